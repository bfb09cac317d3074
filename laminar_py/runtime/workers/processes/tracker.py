"""The process of a tracker; the tracker's own package is imported here and nowhere else."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from laminar_py.observe.trackers import TRACKERS, Ending, Message, Rewound, Values
from laminar_py.records.codec import decode
from laminar_py.runtime.workers.processes.setup import PartActor, log_to
from laminar_py.runtime.workers.specs import TrackerSpec

NICENESS = 10


class TrackerError(Exception):
    """An error in a tracker's package, of any kind: never a mistake of ours."""


class TrackerActor(PartActor):
    """Shell of a tracker; single-threaded."""

    def start(self, data: bytes) -> None:
        """Open or go on with the tracker's run."""
        spec = decode(TrackerSpec, data)
        os.nice(NICENESS)
        os.environ.update(spec.environment)
        log_to(spec.opening.folder, f"tracker-{spec.opening.kind}")
        with _faults():
            self._tracker = TRACKERS[spec.opening.kind](spec.opening)

    def tell(self, data: bytes) -> None:
        """Pass a message on."""
        message: Message = decode(Message, data)  # type: ignore[arg-type]
        with _faults():
            match message:
                case Values(step, values):
                    self._tracker.log(step, values)
                case Rewound(step):
                    self._tracker.undo(step)
                case Ending(summary):
                    self._tracker.close(summary)


@contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise TrackerError(f"{type(error).__name__}: {error}") from error
