"""The settings, the folder and the weights of an evaluation by `laminar eval`. Called by `launch`.

An evaluation is a run of its own, `runs/eval-<name>-<n>`, whose weights never change. It exports the weights of a
checkpoint into its folder. It changes neither the run that it evaluates nor another evaluation
(`tests/orchestrator/test_eval_launch.py`).
"""

import shutil
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from laminar_py.config.changes import unquantized
from laminar_py.config.cluster import Device
from laminar_py.config.loading import dump_config, load_config, parse_config
from laminar_py.config.rollout import NO_PLANNER
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.ledger.database import reading
from laminar_py.ledger.evaluations import evaluations_on_record, read_answers
from laminar_py.ledger.recovery import is_finished
from laminar_py.ledger.run_folder import RunFolder, runs_of
from laminar_py.observe.summary import EvaluationFigures, evaluation_figures, write_summary
from laminar_py.records.evaluations import EvalAnswer, pass_id
from laminar_py.records.host import write_file
from laminar_py.records.weights import Published
from laminar_py.runtime.orchestrator.exports import export, run_of
from laminar_py.runtime.orchestrator.versions import record_version
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.learner import publish_model
from laminar_py.runtime.workers.relays import Relays

MODEL = "model"  # folder in the evaluation, for the exported weights of a checkpoint


class EvalSource(msgspec.Struct, frozen=True, kw_only=True):
    """The evaluated checkpoint or model folder.

    E.g. `EvalSource(path="runs/math-1/checkpoints/step-40-1.0", step=40)`.
    """

    path: str
    step: int  # of the checkpoint; 0 for a model folder


class EvalSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of `laminar eval`: its folder `run`, its source, and the figures of each evaluated set."""

    run: str
    source: EvalSource
    finished: bool
    evaluations: list[EvaluationFigures]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """Request for an evaluation; without `sets` all are evaluated; without `config` the config is the run's."""

    source: Path
    config: Path | None = None
    sets: Sequence[str] = ()
    overrides: Sequence[str] = ()
    resume: bool = False


def settings_of(request: EvalRequest) -> RunConfig:
    """Return the config of an evaluation: no training settings, the chosen sets, and not yet the model."""
    if request.config is not None:
        path = request.config
    elif _is_model(request.source):
        raise ConfigError(f"source={request.source}: a model folder has no sets; name a config with --config")
    else:
        path = run_of(request.source).config
    config = load_config(path, list(request.overrides))
    engine = config.rollout.engine
    if engine.emulates is not None:
        raise ConfigError(
            f"rollout.engine.kind={engine.kind}: emulated responses use no model; evaluate another run"
        )
    sets = _chosen(config, request.sets)
    tree = config.model_dump(mode="json")
    tree |= {"name": f"eval-{config.name}", "warm_start": None, "algorithm": {}, "learner": {}, "tracking": {}}
    tree["repack"] = {"planner": NO_PLANNER}
    tree["cluster"]["learner_device"] = str(Device.CPU)  # leaves all GPUs to replicas
    tree["eval"] = {"sets": {name: tree["eval"]["sets"][name] for name in sets}}
    tree["reward"]["by_set"] = {name: terms for name, terms in tree["reward"]["by_set"].items() if name in sets}
    return parse_config(tree)


def _chosen(config: RunConfig, names: Sequence[str]) -> list[str]:
    """Return the sets to evaluate, in the order of the config; all without `names`. Raises ConfigError."""
    known = list(config.eval.sets)
    if not known:
        raise ConfigError("eval.sets: has no set; add one, e.g. eval.sets.math=math.jsonl")
    for name in names:
        if name not in known:
            raise ConfigError(f"--set={name}: no such set in eval.sets; name one of {', '.join(known)}")
    return [name for name in known if name in names or not names]


def begin_evaluation(run: RunFolder, settings: RunConfig, source: Path) -> None:
    """Write weights, config and, last, the source into the evaluation's folder."""
    if _is_model(source):
        evaluated, model = EvalSource(path=str(source), step=0), source
    else:
        model = run.path / MODEL
        exported = export(source, model)  # names the checkpoint, since the run may have saved a newer one
        evaluated = EvalSource(path=str(exported.checkpoint), step=exported.step)
    run.config.write_text(dump_config(_of_model(settings, model)))
    partial = run.source.with_name(f"{run.source.name}.tmp")
    write_file(partial, msgspec.json.encode(evaluated))
    partial.replace(run.source)


def clear_unbegun(settings: RunConfig) -> None:
    """Delete the folders of evaluations that were killed while they exported their weights."""
    for run in runs_of(settings):
        if (run.path / MODEL).is_dir() and read_source(run) is None and run.try_lock():
            shutil.rmtree(run.path)
            run.unlock()


def _is_model(source: Path) -> bool:
    return (source / "config.json").is_file()


def _of_model(config: RunConfig, model: Path) -> RunConfig:
    tree = config.model_dump(mode="json")
    tree["model"] |= {"path": str(model), "from_scratch": False}
    return unquantized(parse_config(tree))  # no learner would compare rounded weights


def find_open(settings: RunConfig, source: Path) -> RunFolder:
    """Return the newest unfinished evaluation of `source`, if possible an idle one. Raises `ConfigError`."""
    same = [run for run in runs_of(settings) if _is_of(run, source) and _has_settings(run, settings)]
    unfinished = [run for run in same if not (run.has_ledger and is_finished(run.path))]
    if not unfinished:
        raise ConfigError(
            f"source={source}: {settings.runs} has no unfinished {settings.name}-<n> of this source and settings;"
            " leave --resume out"
        )
    return next((run for run in unfinished if not run.is_locked), unfinished[0])


def _is_of(run: RunFolder, source: Path) -> bool:
    """Return True if `run` evaluates `source`, or a checkpoint inside the folder `source`."""
    recorded = read_source(run)
    return recorded is not None and Path(recorded.path).resolve().is_relative_to(source.resolve())


def read_source(run: RunFolder) -> EvalSource | None:
    """Return the source of an evaluation; None if its process was killed before it wrote the source."""
    with suppress(FileNotFoundError):
        return msgspec.json.decode(run.source.read_bytes(), type=EvalSource)
    return None


def _has_settings(run: RunFolder, settings: RunConfig) -> bool:
    """Return True if an evaluation has these settings, apart from its model; False if its config is unreadable."""
    try:
        then = load_config(run.config, [])
    except ConfigError:
        return False
    return then == _of_model(settings, then.model.path)


# ---- the record of an evaluation


def answers_on_record(
    run: RunFolder, names: Sequence[str], *, done: Container[str]
) -> dict[str, Mapping[str, EvalAnswer]]:
    """Return the recorded answers by pass id, for the pass over each set that has no id in `done`."""
    ids = [pass_id(index, name) for index, name in enumerate(names)]
    with reading(run.ledger) as connection:
        return {id: read_answers(connection, id) for id in ids if id not in done}


async def publish_source(incarnation: Incarnation, relays: Relays, *, step: int) -> Published:
    """Publish the weights of an evaluation as version 0, and record them as weights of `step`; return the version.

    Raises `ConfigError` if a resumed evaluation began with other weights.
    """
    published = await publish_model(incarnation, relays)
    with reading(incarnation.run.ledger) as connection:
        known = connection.execute("SELECT digest FROM version WHERE version = 0").fetchone()
    if known is None:
        record_version(incarnation, published, step=step, parent=None)
    elif str(known[0]) != published.digest:
        raise ConfigError(
            f"model.path={incarnation.config.model.path}: holds other weights than this evaluation began with;"
            " begin another one, without --resume"
        )
    return published


def summarise_evaluation(run: RunFolder, source: EvalSource, *, finished: bool) -> EvalSummary:
    """Write `summary.json` of an evaluation from its ledger, which must be up to date; return the summary."""
    with reading(run.ledger) as connection:
        evaluations = evaluation_figures(evaluations_on_record(connection))
    summary = EvalSummary(run=str(run.path), source=source, finished=finished, evaluations=evaluations)
    write_summary(run, summary)
    return summary
