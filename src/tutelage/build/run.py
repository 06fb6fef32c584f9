"""A recipe becomes a run folder: assemble, train, draw; or go on from a checkpoint."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tutelage import runfolder
from tutelage.algorithms import algorithm_of
from tutelage.build.check import require_named
from tutelage.build.data import StageData, batch_maker, stage_data, training_source
from tutelage.build.environments import has_environments
from tutelage.build.folds import cross_validate
from tutelage.build.functions import with_rule_paths
from tutelage.build.generation import connect, first_weights_are_published, routed
from tutelage.build.paths import with_full_paths
from tutelage.build.preemption import on_sigterm
from tutelage.build.ready import require_extras, require_ready
from tutelage.build.stages import Stage, build_stage
from tutelage.build.transport import make_transport, restart_lost
from tutelage.build.truths import truth_notes
from tutelage.checkpoints import Checkpoints
from tutelage.config import AnyConfig, DistillConfig, GeneratingConfig, RewardModelConfig, dump_config
from tutelage.config.checks import check_sense
from tutelage.config.grpo import refill_warnings
from tutelage.config.loading import Loaded
from tutelage.config.resuming import load_to_resume
from tutelage.controller import Controller
from tutelage.errors import CheckpointError, ClusterError
from tutelage.evals.unscored import UnscoredResponses
from tutelage.mirror import Mirror
from tutelage.models.paths import local_path
from tutelage.protocols import Transport
from tutelage.reports.display import Display, make_display
from tutelage.reports.html import write_report
from tutelage.reports.metrics_log import MetricsLog, write_bytes
from tutelage.schedules import make_schedule
from tutelage.trackers import make_trackers
from tutelage.transport.roleset import RoleSet


@dataclass(frozen=True)
class RunResult:
    folder: Path
    summary: dict[str, Any]

    @property
    def best_model(self) -> Path:
        """The model folder that held-out quality chose."""
        return self.folder / "checkpoints" / "best" / "model"


def run_recipe(loaded: Loaded, display: str = "auto", stream: TextIO | None = None) -> RunResult:
    """Train what the recipe says.  Raises TutelageError for anything the user can mend.

    stream: where the display writes; default: stdout.
    """
    cfg = with_full_paths(with_rule_paths(loaded.config, loaded.recipe_path))
    require_extras(cfg)
    require_named(cfg)
    algorithm_of(cfg)
    data = stage_data(cfg)
    if isinstance(cfg, RewardModelConfig) and cfg.reward_model.folds > 1:
        folder = start_folder(cfg, data)
        return RunResult(folder, cross_validate(cfg, data, folder, display, stream))
    stage = build_stage(cfg, data)
    rows = len(data.prepared.train)
    stage.notes += [*check_sense(cfg), *refill_warnings(cfg, rows, training_source(cfg, rows)[1])]
    stage.notes += truth_notes(cfg, data)
    require_ready(cfg, data, stage.names)
    if cfg.checkpoint.mirror is not None:
        mirror = Mirror.of(cfg.checkpoint.mirror, Path(runfolder.next_name(cfg.output_dir, cfg.name)))
        mirror.require_free()
        mirror.require_writable()
    show = make_display(display, training_source(cfg, len(data.prepared.train))[1], cfg.name, stream=stream)
    transport = make_transport(cfg, show)
    try:
        handles = started(stage, transport)
        folder = start_folder(cfg, data)
        transport.attach(folder)
        return finish(assemble(cfg, data, stage, folder, show, transport, handles))
    finally:
        transport.close()


def resume_run(
    folder: Path, display: str = "auto", overrides: Sequence[str] = (), stream: TextIO | None = None
) -> RunResult:
    """Go on from the last complete checkpoint of a run; of a finished run, its summary as it is.

    overrides: other values for keys of `cluster`; once the run goes on with them they are kept in its config.yaml.
    stream: where the display writes; default: stdout.
    Raises CheckpointError where there is no checkpoint, ConfigError for an override of anything else.
    """
    loaded, changes = load_to_resume(folder / "config.yaml", overrides)
    cfg = with_full_paths(loaded)
    folder = folder if cfg.cluster.transport == "local" else folder.absolute()
    if (folder / "summary.json").exists():
        make_display(display, 0, cfg.name, stream=stream).event(
            "resume", f"{folder} is finished: nothing is left to do"
        )
        return RunResult(folder, runfolder.read_json(folder / "summary.json"))
    latest = Checkpoints(folder / "checkpoints", "", 1).latest()
    if latest is None:
        raise CheckpointError(
            f"{folder} has no complete checkpoint to resume from",
            fix=f"start again with `tutelage run {folder / 'config.yaml'}`, and set checkpoint.every for next time",
        )
    require_extras(cfg)
    data = stage_data(cfg)
    require_same_lineage(folder, cfg, data)
    stage = build_stage(cfg, data)
    require_ready(cfg, data, stage.names)
    show = make_display(display, training_source(cfg, len(data.prepared.train))[1], cfg.name, stream=stream)
    transport = make_transport(cfg, show)
    try:
        handles = started(stage, transport)
        transport.attach(folder)
        first = Checkpoints.step_of(latest) + 1
        controller = assemble(cfg, data, stage, folder, show, transport, handles, first_step=first)
        controller.restore(latest, algorithm_of(cfg).state_from)
        if changes:
            keep_cluster(cfg, changes, controller)
        return finish(controller)
    finally:
        transport.close()


def keep_cluster(cfg: AnyConfig, changes: Sequence[str], controller: Controller) -> None:
    """A run that goes on on another cluster says so, and its settings are those from here on."""
    write_bytes(controller.folder / "config.yaml", dump_config(cfg).encode())
    for change in changes:
        controller.log.event(controller.done, "cluster", change)
        controller.display.event("cluster", change)


def started(stage: Stage, transport: Transport) -> dict[str, Any]:
    """Handles of the stage's roles; what the builder noted is added to the stage's notes."""
    handles, notes = transport.start(stage.builder, stage.names)
    stage.notes = [*notes, *stage.notes]
    cfg = stage.builder.facts.cfg
    found = routed(cfg, handles)
    if first_weights_are_published(cfg):
        found["actor"].publish(0).gather()
    return found


def start_folder(cfg: AnyConfig, data: StageData) -> Path:
    """The run folder with its resolved settings, lineage and preflight; none where they cannot be written."""
    folder = runfolder.create(cfg.output_dir, cfg.name)
    try:
        write_bytes(folder / "config.yaml", dump_config(cfg).encode())
        runfolder.write_json(folder / "lineage.json", lineage_of(cfg, data))
        runfolder.write_json(folder / "preflight.json", data.prepared.preflight.as_dict())
    except CheckpointError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def lineage_of(cfg: AnyConfig, data: StageData) -> dict[str, Any]:
    models = {role: runfolder.model_fingerprint(local_path(path)) for role, path in require_named(cfg).items()}
    return runfolder.lineage(cfg.seed, {"data": data.prepared.fingerprint}, models)


def require_same_lineage(folder: Path, cfg: AnyConfig, data: StageData) -> None:
    """A resumed run needs the data and the models it started from; the reference is made of them again."""
    then, now = runfolder.read_json(folder / "lineage.json"), lineage_of(cfg, data)
    for kind in ("data", "models"):
        for name, fingerprint in then[kind].items():
            if now[kind].get(name) != fingerprint:
                raise CheckpointError(
                    f"the {name} of {folder} changed since the run began (fingerprint {fingerprint[:12]}, "
                    f"now {str(now[kind].get(name))[:12]})",
                    fix="put back what the run started from, or start a new run",
                )
    before, here = (found["machine"].get("kernels", "not recorded") for found in (then, now))
    if before != here:
        warnings.warn(
            f"{folder} began with CPU kernels: {before}; now: {here}. What is computed in bfloat16, and tokens drawn "
            "on a CPU, may differ in their last bits from what the run would have computed (docs/kernels.md)",
            stacklevel=2,
        )


def assemble(
    cfg: AnyConfig,
    data: StageData,
    stage: Stage,
    folder: Path,
    show: Display,
    transport: Transport,
    handles: dict[str, Any],
    first_step: int = 0,
) -> Controller:
    """The controller with everything it drives.  first_step: the first one that a resumed run takes again."""
    algorithm, spec, roles = algorithm_of(cfg), stage.spec, RoleSet(handles)
    source, total = training_source(cfg, len(data.prepared.train))
    log = MetricsLog(folder)
    renamed = [f"{cfg.name} was there already, this run is {folder.name}"] if folder.name != cfg.name else []
    notes = [("data", line) for line in [*data.prepared.preflight.lines(), *data.notes]]
    for kind, line in [*notes, *(("model", line) for line in [*renamed, *stage.notes])]:
        show.event(kind, line)
        if not first_step:
            log.event(0, kind, line)
    for line in transport.places():
        show.event("cluster", line)
        log.event(max(first_step - 1, 0), "cluster", line)
    return Controller(
        folder=folder,
        total_steps=total,
        schedule=make_schedule(algorithm, transport, roles, cfg),
        transport=transport,
        roles=roles,
        learners=spec.learners,
        source=source,
        make_batch=batch_maker(data.prepared.train, cfg),
        evaluator=spec.evaluator(cfg, data, roles, folder),
        evaluate_every=cfg.evaluation.every,
        checkpoints=Checkpoints(folder / "checkpoints", spec.learners[0], cfg.checkpoint.keep),
        checkpoint_every=cfg.checkpoint.every,
        alarms=spec.alarms(cfg),
        log=log,
        display=show,
        trackers=make_trackers(cfg.tracking, folder, cfg.name, cfg.model_dump(), first_step=first_step),
        finish=lambda: spec.finish(roles),
        mirror=None if cfg.checkpoint.mirror is None else Mirror.of(cfg.checkpoint.mirror, folder),
        after_step=UnscoredResponses(roles, folder).take if skips_unscored(cfg) else None,
        rebuild=lambda error: rebuild(error, cfg, transport, handles),
        restarts=cfg.cluster.restarts,
        state=algorithm.initial_state(cfg),
    )


def skips_unscored(cfg: AnyConfig) -> bool:
    """Whether a response without a score is left out, and told of, instead of ending the run."""
    if not isinstance(cfg, GeneratingConfig) or (isinstance(cfg, DistillConfig) and not cfg.rewarded):
        return False
    return cfg.reward.on_error == "skip" or has_environments(cfg)


def rebuild(error: ClusterError, cfg: AnyConfig, transport: Transport, handles: dict[str, Any]) -> str:
    """Lost pools start again, and it is said where; where weights go over a wire of their own, it is opened again."""
    restart_lost(transport, error)
    connect(cfg, handles)
    return "; ".join(transport.places())


def finish(controller: Controller) -> RunResult:
    with on_sigterm(controller.leave):
        summary = controller.run()
    write_report(controller.folder)
    return RunResult(controller.folder, summary)
