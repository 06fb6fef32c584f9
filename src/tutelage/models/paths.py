"""Where a model is: a local folder or a hub name, and what can be said about it before a weight is loaded."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from tutelage.errors import ModelError, ModelNotFoundError, closest

HEAD_FILE = "tutelage_head.json"
ADAPTER_FILE = "adapter_config.json"

# Position ids of these begin at pad_token_id + 1, and as many positions fewer can be used.
_OFFSET_MODELS = frozenset({"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text"})


def require_model(path: str) -> None:
    """Raise ModelNotFoundError unless `path` is a model folder or could be a hub name. Nothing is downloaded."""
    folder = Path(path).expanduser()
    if folder.exists():
        _require_model_folder(folder)
    elif _looks_local(path):
        raise _not_found(folder)


def is_local(path: str) -> bool:
    """Whether `path` is a folder here; else it is taken as a hub name."""
    return Path(path).expanduser().is_dir()


def local_path(path: str) -> str:
    """The path to hand to transformers: with `~` expanded where it is a folder here."""
    return str(Path(path).expanduser()) if is_local(path) else path


def _looks_local(path: str) -> bool:
    """A hub name is NAME or OWNER/NAME; where OWNER is a folder here, a missing folder in it is meant."""
    parts = Path(path).parts
    return path.startswith((".", "/", "~", os.sep)) or len(parts) > 2 or (len(parts) == 2 and Path(parts[0]).is_dir())


def _not_found(folder: Path) -> ModelNotFoundError:
    parent = folder.parent
    while not parent.exists():
        parent = parent.parent
    siblings = [p.name for p in parent.iterdir() if p.is_dir()] if parent == folder.parent else []
    guess = closest(folder.name, siblings)
    if not guess and parent != folder.parent:
        guess = f" The nearest folder that exists is {parent}."
    return ModelNotFoundError(
        f"model folder {folder} does not exist.{guess}",
        fix="give the path of a folder that holds config.json and safetensors weights, or a hub name",
    )


def _require_model_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder} is a file, not a model folder", fix=f"did you mean {folder.parent}?")
    if (folder / ADAPTER_FILE).is_file():
        return
    if not (folder / "config.json").is_file():
        inside = [p for p in folder.iterdir() if (p / "config.json").is_file()] if folder.is_dir() else []
        names = sorted(p.name for p in folder.iterdir())
        seen = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"
        fix = f"use {inside[0]}" if inside else "give a folder written by save_pretrained: config.json and safetensors"
        raise ModelNotFoundError(f"{folder} is not a model folder: it has no config.json; it holds {seen}", fix=fix)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder} holds no safetensors weights; pickled weights (.bin, .pt) are never opened",
            fix="load it once in transformers and write it again with save_pretrained",
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and load reports, which speak of tensors that we check ourselves."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def loading(path: str) -> Iterator[None]:
    """What transformers and the hub raise while loading becomes a ModelError."""
    require_model(path)
    try:
        with quiet():
            yield
    except OSError as error:
        if isinstance(error, ModelError):
            raise
        reason = str(error).strip().splitlines()[0]
        if is_local(path):
            raise ModelError(f"{path} cannot be loaded: {reason}", fix="write the folder again") from error
        raise ModelNotFoundError(
            f"{path} is no folder here, and as a hub name it cannot be loaded: {reason}",
            fix="check the name and the connection, or download the model and give its folder",
        ) from error
    except ValueError as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"{path} cannot be loaded: {str(error).strip().splitlines()[0]}",
            fix="use a model that the installed transformers knows, without code of its own",
        ) from error


def base_of_adapter(path: str) -> str | None:
    """The base model that an adapter folder names, or None where `path` is no adapter. Raises ModelError."""
    file = Path(path).expanduser() / ADAPTER_FILE
    if not file.is_file():
        return None
    base = read_json(file).get("base_model_name_or_path")
    if not base:
        raise ModelError(
            f"{file} names no base model (base_model_name_or_path)",
            fix="add the folder or hub name of the model that the adapter was trained on",
        )
    return str(base)


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}", fix="restore the model folder") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds no JSON object", fix="restore the model folder")
    return content


def load_config(path: str) -> PreTrainedConfig:
    """The configuration alone; of its base for an adapter. Raises ModelNotFoundError, ModelError."""
    base = base_of_adapter(path)
    if base is not None:
        return load_config(base)
    with loading(path):
        return AutoConfig.from_pretrained(local_path(path), trust_remote_code=False)


def position_offset(config: PreTrainedConfig) -> int:
    """The position id of a sequence's first token: 0, and pad_token_id + 1 for the RoBERTa family."""
    pad = getattr(config, "pad_token_id", None)
    return int(pad) + 1 if config.model_type in _OFFSET_MODELS and pad is not None else 0


def max_positions(config: PreTrainedConfig) -> int | None:
    """The longest sequence of a model in tokens, or None where the architecture sets no limit."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit - position_offset(config)
    return None


def context_length(path: str) -> int | None:
    """`max_positions` of the model at `path`, read from its configuration alone. Raises ModelNotFoundError."""
    return max_positions(load_config(path))


def weights_size(path: str) -> int:
    """Bytes of the safetensors files of a local folder (with its adapter's base); 0 for a hub name."""
    base = base_of_adapter(path)
    own = sum(f.stat().st_size for f in Path(path).expanduser().glob("*.safetensors")) if is_local(path) else 0
    return own + (weights_size(base) if base is not None else 0)
