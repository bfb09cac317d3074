"""The process of one rank of the learner."""

import os
from pathlib import Path

from laminar_py.records.codec import decode, encode
from laminar_py.records.metrics import LearnerProgress
from laminar_py.runtime.workers.processes.one_thread import OneThread
from laminar_py.runtime.workers.processes.setup import (
    PartActor,
    compute_on,
    learner_threads,
    open_part,
    open_reader,
)
from laminar_py.runtime.workers.specs import FetchRequest, LearnerSpec, StepRequest


def _import_learner() -> None:
    import laminar_py.runtime.workers.processes.learner_part  # noqa: F401 (for `start`)


class LearnerActor(PartActor):
    """Shell of a rank. Calls come on threads, as some are waited for beside a step; all computing is on one."""

    def __init__(self) -> None:
        super().__init__()
        self._progress = LearnerProgress("loading", 0, 1, 0.0)
        self._one = OneThread()
        self._one.begin(_import_learner)  # seconds, in which the relays start

    def progress(self) -> bytes:
        """`LearnerProgress` while `start` runs."""
        return encode(self._progress)

    def start(self, data: bytes) -> bytes:
        """Load or warm-start the model, restore a checkpoint; `LearnerStarted`."""
        return self._one.run(lambda: self._start(decode(LearnerSpec, data)))

    def _start(self, spec: LearnerSpec) -> bytes:
        from laminar_py.relay.pages import allow_many_files
        from laminar_py.runtime.workers.processes.learner_part import LearnerPart

        config = open_part(spec, f"learner-{spec.rank}")
        compute_on(learner_threads(config, num_cores=len(os.sched_getaffinity(0)), ranks_here=spec.ranks_here))
        allow_many_files()
        self._part = LearnerPart(config, spec, reader=open_reader(spec), note=self._note)
        return encode(self._part.started())

    def _note(self, progress: LearnerProgress) -> None:
        self._progress = progress

    def fetch(self, data: bytes) -> bytes:
        """Read the tokens of a `FetchRequest`; what is lost, a `dict[str, str]`."""
        return self._one.run(lambda: encode(self._part.fetch(decode(FetchRequest, data))))

    def step(self, data: bytes) -> bytes:
        """Take an optimizer step and begin its publication; `StepOutcome`."""
        return self._one.run(lambda: encode(self._part.step(decode(StepRequest, data))))

    def publish(self, version: int) -> float:
        """Publish the weights as they are; seconds that the learner stood still."""
        return self._one.run(lambda: self._part.publish(version))

    def completed(self, version: int) -> bytes:
        """`Published`, once that version is complete."""
        return encode(self._part.completed(version))

    def save(self, path: str) -> None:
        """Begin a checkpoint in a folder; the state is copied when this returns."""
        self._one.run(lambda: self._part.save(Path(path)))

    def saved(self) -> None:
        """Return when that checkpoint is complete on disk."""
        self._part.saved()
