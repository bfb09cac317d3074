"""TensorBoard, wandb and MLflow behind one interface, each in a process of its own beside the controller.

A tracker that opens again for a run folder continues its earlier run. Steps that a roll-back undid do not count
(`tests/telemetry/test_trackers.py`):

- TensorBoard: a session marker stands at the first repeated step, and readers drop the older points.
- wandb, MLflow: a point `run/continued_from` stands before the repeated steps. The newer of two points at a step
  counts.
"""

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Protocol, TypeAlias

import msgspec

from laminar_py.config.run import TrackerKind
from laminar_py.config.section import ConfigError
from laminar_py.observe.summary import Summary
from laminar_py.records.events import Evaluated
from laminar_py.records.metrics import StepRow, TokenFigures

Setting: TypeAlias = bool | int | float | str
CONTINUED = "run/continued_from"
PARAMS_IN_A_CALL = 100  # limit of MLflow


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a tracker.

    E.g. `Opening(kind=kind, folder="runs/math-3", name="math-3", project="math", settings={"learner.lr": 1e-6})`.
    """

    kind: TrackerKind
    folder: str  # of the run
    name: str
    project: str
    settings: dict[str, Setting]  # the resolved config


class Values(msgspec.Struct, frozen=True, tag=True):
    """Message for `Tracker.log`."""

    step: int
    values: dict[str, float]


class Rewound(msgspec.Struct, frozen=True, tag=True):
    """Message for `Tracker.undo`."""

    step: int


class Ending(msgspec.Struct, frozen=True, tag=True):
    """Message for `Tracker.close`."""

    summary: dict[str, float] | None


Message: TypeAlias = Values | Rewound | Ending


class Tracker(Protocol):
    """A run in a tracker. An error ends the tracker's process."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write values of a learner step, e.g. `log(3, {"tokens/entropy": 1.2})`."""
        ...

    def undo(self, step: int) -> None:
        """Note that steps after this one are undone, and will be repeated."""
        ...

    def close(self, summary: Mapping[str, float] | None) -> None:
        """End the run. Without a summary it failed; with `summary/finished` of 0 it was interrupted."""
        ...


class TensorBoard:
    """Event files in `<run>/tensorboard`: `tensorboard --logdir runs` shows all runs."""

    def __init__(self, opening: Opening) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        folder = Path(opening.folder) / "tensorboard"
        is_new = not folder.is_dir()
        self._writer = EventFileWriter(str(folder))
        self._step = 0
        if is_new:
            self.undo(-1)  # for readers the first marker begins the run
            self._write(0, summary=hparams_pb(opening.settings))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a scalar for each value."""
        self._step = max(step, self._step)
        scalars = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step, summary=self._summaries.Summary(value=scalars))

    def undo(self, step: int) -> None:
        """Write a session marker, at which readers drop older points after this step."""
        self._step = max(0, step)
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(step + 1, session_log=start)

    def close(self, summary: Mapping[str, float] | None) -> None:
        """Write the summary as scalars at the last step."""
        self.log(self._step, summary or {})
        self._writer.close()

    def _write(self, step: int, **content: object) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))
        self._writer.flush()


class Wandb:
    """A run of wandb, configured by wandb's environment variables; `<run>/wandb.id` has its id."""

    def __init__(self, opening: Opening) -> None:
        import wandb

        self._wandb = wandb
        folder = Path(opening.folder)
        identity = folder / "wandb.id"
        if not identity.is_file():
            identity.write_text(token_hex(8))
        self._run = wandb.init(
            project=opening.project,
            name=opening.name,
            id=identity.read_text(),
            resume="allow",
            dir=str(folder),
            config=opening.settings,
            settings=wandb.Settings(console="off", silent=True),
        )
        # wandb's own steps never go back, but deferred evaluations and roll-backs do
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a row of the history."""
        self._run.log({"step": step, **values})

    def undo(self, step: int) -> None:
        """Write a row with `run/continued_from`."""
        self.log(step, {CONTINUED: step})

    def close(self, summary: Mapping[str, float] | None) -> None:
        """Write the summary and wait for the upload."""
        self._run.summary.update(summary or {})
        self._run.finish(exit_code=int(summary is None))
        self._wandb.teardown()  # so that wandb's process has written everything


class MLflow:
    """A run of MLflow at `MLFLOW_TRACKING_URI`, else in `<runs>/mlflow.db`; `<run>/mlflow.id` has its id."""

    def __init__(self, opening: Opening) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        folder = Path(opening.folder).resolve()
        uri = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else f"sqlite:///{folder.parent}/mlflow.db"
        self._client, self._metric = mlflow.MlflowClient(uri), Metric
        identity = folder / "mlflow.id"
        if identity.is_file():
            self._id: str = identity.read_text()
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(opening.project)
        place = experiment.experiment_id if experiment else self._client.create_experiment(opening.project)
        self._id = self._client.create_run(place, run_name=opening.name).info.run_id
        params = [Param(name, str(value)) for name, value in opening.settings.items()]
        for start in range(0, len(params), PARAMS_IN_A_CALL):
            self._client.log_batch(self._id, params=params[start : start + PARAMS_IN_A_CALL])
        identity.write_text(self._id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write values in one request."""
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def undo(self, step: int) -> None:
        """Write a point `run/continued_from`."""
        self.log(step, {CONTINUED: step})

    def close(self, summary: Mapping[str, float] | None) -> None:
        """Write the summary as metrics at step 0."""
        self.log(0, summary or {})
        status = "FAILED" if summary is None else "FINISHED" if summary["summary/finished"] else "KILLED"
        self._client.set_terminated(self._id, status=status)


TRACKERS: dict[TrackerKind, Callable[[Opening], Tracker]] = {
    TrackerKind.TENSORBOARD: TensorBoard,
    TrackerKind.WANDB: Wandb,
    TrackerKind.MLFLOW: MLflow,
}
PACKAGES = {
    TrackerKind.TENSORBOARD: "tensorboard",
    TrackerKind.WANDB: "wandb",
    TrackerKind.MLFLOW: "mlflow-skinny sqlalchemy alembic",
}


def check_trackers(kinds: Sequence[TrackerKind]) -> None:
    """Raise `ConfigError` if a tracker's package is missing, without an import."""
    for kind in kinds:
        spec = importlib.util.find_spec(kind.value)
        if spec is None or spec.origin is None:  # a folder of that name, e.g. of wandb's files
            raise ConfigError(
                f"tracking.kinds={kind.value}: the package {kind.value} is not installed; pip install"
                f" {PACKAGES[kind]}, or leave it out"
            )


def flat_row(row: StepRow) -> dict[str, float]:
    """Return a row of `metrics.jsonl` under the names of docs/metrics.md, e.g. `staleness_3-4/kl_behaviour_k3`."""
    rest = msgspec.to_builtins(row)
    tokens = {name: rest.pop(name) for name in TokenFigures.__struct_fields__}
    ages = {  # MLflow takes no plus sign
        f"staleness_{bucket.replace('+', '_up')}": figures for bucket, figures in rest.pop("by_staleness").items()
    }
    groups = {"order": rest.pop("order"), "reward": rest.pop("reward_terms"), "turns": rest.pop("turns")}
    return _numbers({"run": rest, "tokens": tokens, **groups, **ages})


def flat_evaluation(result: Evaluated) -> dict[str, float]:
    """Return the figures of an evaluation, e.g. `eval/aime/mean`, `eval/aime/pass_at_32` (MLflow takes no @).

    The mean has one name for accuracies and mean rewards, so a set has one curve.
    """
    figures = result.figures
    values = {"mean": figures.mean, "truncated": figures.truncated}
    values |= {f"pass_at_{k}": one for k, one in figures.pass_at.items() if k > 1}
    if figures.majority is not None:
        values["majority"] = figures.majority
    numbers: dict[str, float] = {name: one.value for name, one in values.items()}
    numbers |= {"mean_low": figures.mean.low, "mean_high": figures.mean.high}
    numbers |= {"length_p50": figures.length_p50, "length_p95": figures.length_p95}
    numbers |= {"version": result.version, "rl_s": result.rl_s}
    return {f"eval/{result.set_name}/{name}": value for name, value in numbers.items()}


def flat_summary(summary: Summary) -> dict[str, float]:
    """Return the numbers of a summary without its evaluations, e.g. `summary/trajectories/consumed`."""
    return _numbers({"summary": msgspec.to_builtins(summary)})


def flat_settings(tree: Mapping[str, object]) -> dict[str, Setting]:
    """Return a config with dotted names, without null; a list becomes text."""
    leaves = {name: value for name, value in _leaves(tree, ".").items() if value is not None}
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in leaves.items()
    }


def _numbers(tree: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers of nested mappings, with the names of their path joined by slashes."""
    return {name: float(value) for name, value in _leaves(tree, "/").items() if isinstance(value, int | float)}


def _leaves(tree: Mapping[str, object], separator: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= {f"{name}{separator}{below}": leaf for below, leaf in _leaves(value, separator).items()}
        else:
            found[name] = value
    return found
