"""Work in the process of the reference model. Called by `processes.reference`."""

import time
from collections.abc import Sequence

from laminar_py.config.run import RunConfig
from laminar_py.engines.model_sizes import read_sizes
from laminar_py.learner.distributed import join_group
from laminar_py.learner.reference import ReferenceModel
from laminar_py.records.trajectory import Trajectory
from laminar_py.workers.processes.learner_part import start_model
from laminar_py.workers.specs import ReferenceAnswer


class ReferencePart:
    """The model that the config names, or the one that RL begins with, which a warm start has made by then."""

    def __init__(self, config: RunConfig, *, rendezvous: str) -> None:
        device = config.learner_device.value
        self._model = ReferenceModel(
            config.algorithm.reference or start_model(config).path,
            vocab_size=read_sizes(config.model.path).vocab_size,
            temperature=config.rollout.sampling.temperature,
            mesh=join_group(rendezvous, rank=0, world_size=1, device_type=device),
            offload=config.learner.offload,
        )

    def logprobs(self, trajectories: Sequence[Trajectory]) -> ReferenceAnswer:
        """Log-probabilities of one packed pass."""
        started = time.perf_counter()
        logprobs = self._model.logprobs(trajectories)
        return ReferenceAnswer(logprobs, time.perf_counter() - started)
