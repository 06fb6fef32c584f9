"""chat and export: using the model of a run."""

from __future__ import annotations

import shutil
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tutelage.cli.console import require_run
from tutelage.errors import CheckpointError

COMMANDS = "An empty line or Ctrl-D ends, /reset forgets the conversation."


def model_folder(path: str) -> str:
    """A model folder or hub name as it is; of a run folder, its best model, else its last."""
    folder = Path(path)
    if (folder / "config.yaml").is_file() and not (folder / "config.json").is_file():
        return str(exported_model(folder, Which.best))
    return path


def chat(
    model: Annotated[str, typer.Argument(help="Model folder, run folder or hub name.")],
    prompt: Annotated[str | None, typer.Option(help="Answer this once and stop.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.", min=0.0)] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k most likely tokens.", min=1)] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among the smallest set of this mass.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the top one's.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length limit of an answer.", min=1)] = 256,
    seed: Annotated[int, typer.Option(help="Keys the sampling.", min=0)] = 0,
) -> None:
    """Talk to a model."""
    from tutelage.build import chat_engine

    sampling: dict[str, Any] = {"max_new_tokens": max_new_tokens, "seed": seed}
    if temperature == 0:
        sampling["greedy"] = True
    else:
        sampling["temperature"] = temperature
    limits = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    sampling.update({name: value for name, value in limits.items() if value is not None})
    engine = chat_engine(model_folder(model))
    start = [{"role": "system", "content": system}] if system else []
    if prompt is not None:
        _answer(engine, [*start, {"role": "user", "content": prompt}], sampling)
        return
    _talk(engine, start, sampling)


def _talk(engine: Any, start: list[dict[str, str]], sampling: dict[str, Any]) -> None:
    asking = sys.stdin.isatty()
    if asking:
        typer.echo(COMMANDS)
    messages = list(start)
    while True:
        if asking:
            typer.echo("> ", nl=False)
        line = sys.stdin.readline().strip()
        if not line:
            return
        if line == "/reset":
            messages = list(start)
            continue
        messages.append({"role": "user", "content": line})
        answer = _answer(engine, messages, {**sampling, "seed": sampling["seed"] + len(messages)})
        messages.append({"role": "assistant", "content": answer})


def _answer(engine: Any, messages: list[dict[str, str]], sampling: dict[str, Any]) -> str:
    answer: str = engine.complete(messages, **sampling)
    typer.echo(answer)
    return answer


class Which(StrEnum):
    """Which model of a run."""

    best = "best"
    final = "final"


def exported_model(run: Path, which: Which) -> Path:
    """The Hugging Face folder inside a run: of the best checkpoint (where one was chosen), or of the last."""
    checkpoints = run / "checkpoints"
    best = checkpoints / "best" / "model"
    if which is Which.best and (best / "config.json").is_file():
        return best
    steps = sorted(p for p in checkpoints.glob("step_*/model") if (p / "config.json").is_file())
    if not steps:
        raise CheckpointError(f"{run} holds no finished checkpoint", fix=f"go on with it first: tutelage resume {run}")
    return steps[-1]


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", metavar="RUN")],
    destination: Annotated[Path, typer.Argument(help="A folder that does not exist yet.", metavar="DEST")],
    which: Annotated[Which, typer.Option(help="The best model by held-out quality, or the last.")] = Which.best,
) -> None:
    """Copy a run's model: an ordinary Hugging Face folder."""
    source = exported_model(require_run(run), which)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise CheckpointError(f"{destination} exists and is not empty", fix="name a folder that does not exist yet")
    partial = destination.with_name(f".{destination.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, partial)
        partial.replace(destination)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{destination} cannot be written: {error}", fix="free disk space there") from error
    typer.echo(f"{source} -> {destination}")
