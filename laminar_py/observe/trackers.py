"""TensorBoard, wandb and MLflow behind one interface. Run in processes of their own, never in the controller.

A package is imported by the tracker that needs it alone. Invariant: a tracker that is opened again for a run
folder goes on with what it began there; steps that a roll-back undid never count, by these means:

- TensorBoard: a session marker at the first step that comes again, by which readers drop the older points.
- wandb, MLflow: nothing can be taken back. A point `run/continued_from` stands between what was undone and what
  replaces it, and the newer of two points at a step is the one that counts.
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
PARAMS_IN_A_CALL = 100  # as many as MLflow takes


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """Beginning of a tracker, e.g. of a run of the project "math":

    `Opening(kind=kind, folder="runs/math-3", name="math-3", project="math", settings={"learner.lr": 1e-6})`.
    """

    kind: TrackerKind
    folder: str  # of the run
    name: str
    project: str
    settings: dict[str, Setting]  # the resolved config


class Values(msgspec.Struct, frozen=True, tag=True):
    """For `Tracker.log`."""

    step: int
    values: dict[str, float]


class Rewound(msgspec.Struct, frozen=True, tag=True):
    """For `Tracker.undo`."""

    step: int


class Ending(msgspec.Struct, frozen=True, tag=True):
    """For `Tracker.close`."""

    summary: dict[str, float] | None


Message: TypeAlias = Values | Rewound | Ending


class Tracker(Protocol):
    """A run in a tracker. Whatever goes wrong is raised, and ends its process."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Values at a learner step, e.g. `log(3, {"tokens/entropy": 1.2})`."""
        ...

    def undo(self, step: int) -> None:
        """Steps after this one are undone, if there were any; the next one comes now."""
        ...

    def close(self, summary: Mapping[str, float] | None) -> None:
        """The run is over; it failed if there is no summary. `summary/finished` is 0 if it was interrupted."""
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
            self.undo(-1)  # readers take the first marker for the beginning
            self._write(0, summary=hparams_pb(opening.settings))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a scalar for each."""
        self._step = max(step, self._step)
        scalars = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step, summary=self._summaries.Summary(value=scalars))

    def undo(self, step: int) -> None:
        """Readers drop all points after this step that stand before this marker."""
        self._step = max(0, step)
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(step + 1, session_log=start)

    def close(self, summary: Mapping[str, float] | None) -> None:
        """The summary is scalars at the last step."""
        self.log(self._step, summary or {})
        self._writer.close()

    def _write(self, step: int, **content: object) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))
        self._writer.flush()


class Wandb:
    """A run of wandb, online or not as its own environment variables say; `<run>/wandb.id` names it."""

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
        # Its own steps never go back, but deferred evaluations and roll-backs do.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a row of its history."""
        self._run.log({"step": step, **values})

    def undo(self, step: int) -> None:
        """A row that says so."""
        self.log(step, {CONTINUED: step})

    def close(self, summary: Mapping[str, float] | None) -> None:
        """Wait until all is uploaded."""
        self._run.summary.update(summary or {})
        self._run.finish(exit_code=int(summary is None))
        self._wandb.teardown()  # its own process has written all then


class MLflow:
    """A run of MLflow where `MLFLOW_TRACKING_URI` says, else in `<runs>/mlflow.db`; `<run>/mlflow.id` names it."""

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
        """Make one request of it."""
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def undo(self, step: int) -> None:
        """A point that says so."""
        self.log(step, {CONTINUED: step})

    def close(self, summary: Mapping[str, float] | None) -> None:
        """The summary is metrics without a place on the axis."""
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
    """Raises ConfigError if a package is missing. Nothing is imported."""
    for kind in kinds:
        spec = importlib.util.find_spec(kind.value)
        if spec is None or spec.origin is None:  # a mere folder of that name, such as wandb leaves behind
            raise ConfigError(
                f"tracking.kinds={kind.value}: the package {kind.value} is not installed; pip install"
                f" {PACKAGES[kind]}, or leave it out"
            )


def flat_row(row: StepRow) -> dict[str, float]:
    """A row of `metrics.jsonl` under the names of docs/metrics.md, e.g. `staleness_3-4/kl_behaviour_k3`."""
    values: dict[str, float] = {}
    for name, value in msgspec.to_builtins(row).items():
        if name == "by_staleness":
            for bucket, metrics in value.items():
                place = f"staleness_{bucket.replace('+', '_up')}"  # MLflow takes no plus sign
                values |= {f"{place}/{key}": one for key, one in metrics.items()}
        elif name == "order":
            leaves = _leaves(value, "/").items()
            values |= {f"order/{key}": one for key, one in leaves if isinstance(one, int | float)}
        elif name == "reward_terms":
            values |= {f"reward/{term}": mean for term, mean in value.items()}
        elif name == "turns":
            values |= {f"turns/{key}": one for key, one in value.items()}
        elif value is not None:
            values[f"{_group(name)}{name}"] = value
    return values


def _group(name: str) -> str:
    return "tokens/" if name in TokenFigures.__struct_fields__ else "run/"


def flat_evaluation(result: Evaluated) -> dict[str, float]:
    """Figures of a set, e.g. `eval/aime/mean`, `eval/aime/pass_at_32`; MLflow takes no @.

    The mean has one name whatever the rewards are, so that a curve is one curve.
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
    """Numbers of a summary, e.g. `summary/trajectories/consumed`; evaluations have been told."""
    leaves = _leaves(msgspec.to_builtins(summary), "/")
    return {f"summary/{name}": float(value) for name, value in leaves.items() if isinstance(value, int | float)}


def flat_settings(tree: Mapping[str, object]) -> dict[str, Setting]:
    """A config with dotted names; lists as text, and nothing for what is null."""
    leaves = {name: value for name, value in _leaves(tree, ".").items() if value is not None}
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in leaves.items()
    }


def _leaves(tree: Mapping[str, object], separator: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= {f"{name}{separator}{below}": leaf for below, leaf in _leaves(value, separator).items()}
        else:
            found[name] = value
    return found
