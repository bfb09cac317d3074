"""The process of the reference model."""

from laminar_py.records.codec import decode, encode
from laminar_py.runtime.workers.processes.one_thread import OneThread
from laminar_py.runtime.workers.processes.setup import PartActor, compute_on, open_part, open_reader, open_writer
from laminar_py.runtime.workers.specs import ReferenceRequest, ReferenceSpec


class ReferenceActor(PartActor):
    """Shell of the reference model. Calls come on threads, as those of a learner do."""

    def __init__(self) -> None:
        super().__init__()
        self._one = OneThread()

    def start(self, data: bytes) -> None:
        """Load the model."""
        self._one.run(lambda: self._start(decode(ReferenceSpec, data)))

    def _start(self, spec: ReferenceSpec) -> None:
        from laminar_py.runtime.workers.processes.reference_part import ReferencePart

        compute_on(1)
        config = open_part(spec, "reference-0")
        self._part = ReferencePart(
            config, rendezvous=spec.rendezvous, reader=open_reader(spec), writer=open_writer(spec)
        )

    def logprobs(self, data: bytes) -> bytes:
        """`ReferenceAnswer` to a `ReferenceRequest`."""
        return self._one.run(lambda: encode(self._part.logprobs(decode(ReferenceRequest, data))))
