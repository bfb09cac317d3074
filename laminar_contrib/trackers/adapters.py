"""TensorBoard, wandb and MLflow as kinds of trackers. Each package is imported in its tracker's process alone.

Steps that a roll-back undid do not count (`tests/telemetry/test_trackers.py`):

- TensorBoard: a session marker stands at the first repeated step, and readers drop the older points.
- wandb, MLflow: a point `run/continued_from` stands before the repeated steps. The newer of two points at a step
  counts.
"""

import importlib.util
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from secrets import token_hex

from laminar_py.config import ConfigError
from laminar_py.config.tracking import Opening, TrackerKind

CONTINUED = "run/continued_from"
PARAMS_IN_A_CALL = 100  # limit of MLflow


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


def require_package(package: str, *, install: str) -> None:
    """Raise `ConfigError` if a tracker's package is missing, without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # a folder of that name, e.g. of wandb's files
        raise ConfigError(
            f"tracking.kinds={package}: the package {package} is not installed; pip install {install}, or leave it"
            " out"
        )


TENSORBOARD = TrackerKind(open=TensorBoard, check=partial(require_package, "tensorboard", install="tensorboard"))
WANDB = TrackerKind(open=Wandb, check=partial(require_package, "wandb", install="wandb"))
MLFLOW = TrackerKind(
    open=MLflow, check=partial(require_package, "mlflow", install="mlflow-skinny sqlalchemy alembic")
)
