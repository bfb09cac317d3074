"""The process of the reference model. Called by `workers.reference`."""

import time

import msgspec

from laminar_py.engines.model_sizes import read_sizes
from laminar_py.learner.distributed import join_group
from laminar_py.learner.reference import ReferenceModel
from laminar_py.ledger.segments.reader import complete_all
from laminar_py.records.columns import REFERENCE_LOGPROBS, token_values
from laminar_py.records.pieces import ColumnPiece, ColumnRef
from laminar_py.runtime.workers.processes.base import (
    ComputingActor,
    compute_on,
    on_compute_thread,
    open_part,
    open_reader,
    open_writer,
)
from laminar_py.runtime.workers.processes.learner import start_model
from laminar_py.runtime.workers.specs import ReferenceAnswer, ReferenceRequest, ReferenceSpec


class ReferenceActor(ComputingActor):
    """Hosts the reference: the model that the config names, or the model that RL begins with."""

    @on_compute_thread
    def start(self, spec: ReferenceSpec) -> None:
        """Load the model."""
        compute_on(1)
        config = open_part(spec, "reference-0")
        self._reader, self._writer = open_reader(spec), open_writer(spec)
        self._model = ReferenceModel(
            config.algorithm.reference or start_model(config).path,
            vocab_size=read_sizes(config.model.path).vocab_size,
            temperature=config.rollout.sampling.temperature,
            mesh=join_group(spec.rendezvous, rank=0, world_size=1, device_type=config.learner_device.value),
            offload=config.learner.offload,
        )

    @on_compute_thread
    def logprobs(self, request: ReferenceRequest) -> ReferenceAnswer:
        """Compute and store the log-probabilities of one packed pass; return references to them."""
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
