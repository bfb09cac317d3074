"""Work in the process of the reference model. Called by `processes.reference`."""

import time

import msgspec

from laminar_py.config.run import RunConfig
from laminar_py.engines.model_sizes import read_sizes
from laminar_py.learner.distributed import join_group
from laminar_py.learner.reference import ReferenceModel
from laminar_py.ledger.segments.reader import PayloadReader, complete_all
from laminar_py.ledger.segments.writer import SegmentWriter
from laminar_py.records.columns import REFERENCE_LOGPROBS, token_values
from laminar_py.records.pieces import ColumnPiece, ColumnRef
from laminar_py.runtime.workers.processes.learner_part import start_model
from laminar_py.runtime.workers.specs import ReferenceAnswer, ReferenceRequest


class ReferencePart:
    """The model that the config names, or the one that RL begins with, which a warm start has made by then."""

    def __init__(
        self, config: RunConfig, *, rendezvous: str, reader: PayloadReader, writer: SegmentWriter
    ) -> None:
        self._reader = reader
        self._writer = writer
        device = config.learner_device.value
        self._model = ReferenceModel(
            config.algorithm.reference or start_model(config).path,
            vocab_size=read_sizes(config.model.path).vocab_size,
            temperature=config.rollout.sampling.temperature,
            mesh=join_group(rendezvous, rank=0, world_size=1, device_type=device),
            offload=config.learner.offload,
        )

    def logprobs(self, request: ReferenceRequest) -> ReferenceAnswer:
        """Have the log-probabilities of one packed pass stored."""
        started = time.perf_counter()
        complete, lost = complete_all(request.trajectories, self._reader, stores=request.stores)
        # a reference chooses its experts itself
        trajectories = [msgspec.structs.replace(one, routed_experts=None) for one in complete.values()]
        answers = zip(trajectories, self._model.logprobs(trajectories) if trajectories else [], strict=True)
        pieces = [
            ColumnPiece(trajectory_id=one.id, name=REFERENCE_LOGPROBS, values=token_values(logprobs))
            for one, logprobs in answers
        ]
        refs = zip(pieces, self._writer.write_all(pieces), strict=True)
        found = {piece.trajectory_id: ColumnRef(piece.values.dtype, at) for piece, at in refs}
        return ReferenceAnswer(found, lost, time.perf_counter() - started)
