"""The process of the reference model."""

import os

from laminar_py.records.codec import decode, encode
from laminar_py.records.trajectory import Trajectory
from laminar_py.workers.processes.one_thread import OneThread
from laminar_py.workers.processes.setup import compute_on_one_core, log_to
from laminar_py.workers.specs import ReferenceSpec


class ReferenceActor:
    """Shell of the reference model. Calls come on threads, as those of a learner do."""

    def __init__(self) -> None:
        self._one = OneThread()

    def start(self, data: bytes) -> int:
        """Load the model; the id of its process."""
        self._one.run(lambda: self._start(decode(ReferenceSpec, data)))
        return self.pid()

    def _start(self, spec: ReferenceSpec) -> None:
        from laminar_py.workers.processes.reference_part import ReferencePart

        compute_on_one_core()
        log_to(spec.run_dir, "reference-0")
        self._part = ReferencePart(spec)

    def pid(self) -> int:
        """Id of the process."""
        return os.getpid()

    def logprobs(self, data: bytes) -> bytes:
        """`ReferenceAnswer` for a list of `Trajectory`."""
        return self._one.run(lambda: encode(self._part.logprobs(decode(list[Trajectory], data))))
