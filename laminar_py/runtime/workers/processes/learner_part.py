"""Work of a learner process: one rank's model, optimizer and checkpoints, and on rank 0 the publisher.

Called by `workers.processes.learner`. Every rank makes every call, in the same order, since each is a collective.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from laminar_py.config.data import ModelConfig
from laminar_py.config.emulation import EmulationConfig
from laminar_py.config.loading import read_profile
from laminar_py.config.run import RunConfig
from laminar_py.data.chat import PromptEncoder
from laminar_py.data.demonstrations import read_demonstrations
from laminar_py.data.sources import DataSource
from laminar_py.data.tokenizer import load_tokenizer
from laminar_py.engines.model_sizes import served_dtype
from laminar_py.learner.attention import choose_kernel
from laminar_py.learner.distributed import join_group
from laminar_py.learner.emulated import EmulatedLearner
from laminar_py.learner.packing.packer import Bundle, microbatches
from laminar_py.learner.step import Learner
from laminar_py.learner.warm_start import Example, cache_key, warm_start
from laminar_py.ledger.segments.reader import PayloadReader, complete_all
from laminar_py.records.metrics import LearnerProgress
from laminar_py.records.weights import Published
from laminar_py.relay.publisher import Publisher
from laminar_py.runtime.workers.specs import FetchRequest, LearnerSpec, LearnerStarted, StepOutcome, StepRequest


class LearnerPart:
    """A rank of the learner, ready to step."""

    def __init__(
        self,
        config: RunConfig,
        spec: LearnerSpec,
        *,
        reader: PayloadReader,
        note: Callable[[LearnerProgress], None],
    ) -> None:
        self._reader = reader
        self._bundles: list[Bundle] = []  # of the next step
        self._learner: Learner | EmulatedLearner
        if config.emulation is None:
            self._learner, self._started = _real_learner(config, spec, note)
        else:
            self._learner, self._started = _emulated_learner(config.emulation)
        if spec.checkpoint is not None:
            self._learner.load(Path(spec.checkpoint))
        self._dtype: torch.dtype = getattr(torch, served_dtype(config.model.path))
        self._publisher: Publisher | None = None
        if spec.rank == 0:
            adapter = None if isinstance(self._learner, EmulatedLearner) else self._learner.adapter_config()
            self._publisher = Publisher(Path(spec.store), chunk_bytes=spec.chunk_bytes, adapter_config=adapter)

    def started(self) -> LearnerStarted:
        """Sizes of the model."""
        return self._started

    def fetch(self, request: FetchRequest) -> dict[str, str]:
        """Read the tokens of the next step; what is lost, by trajectory."""
        wanted = [one for bundle in request.bundles for one in bundle]
        complete, lost = complete_all(wanted, self._reader, stores=request.stores)
        self._bundles = [[complete[one.id] for one in bundle if one.id in complete] for bundle in request.bundles]
        return lost

    def step(self, request: StepRequest) -> StepOutcome:
        """Take an optimizer step on what was fetched; then publish the weights as a version, if asked for."""
        bundles, self._bundles = self._bundles, []
        metrics = self._learner.step(microbatches(bundles, request.terms))
        stall_s = 0.0 if request.version is None else self.publish(request.version)
        return StepOutcome(metrics, request.version, stall_s)

    def publish(self, version: int) -> float:
        """Rank 0 writes the version, the others take part in gathering each tensor; seconds that it took."""
        tensors: Iterable[tuple[str, torch.Tensor]] = self._learner.named_tensors(dtype=self._dtype)
        if self._publisher is not None:
            return self._publisher.publish(version, tensors)
        for _ in tensors:
            continue
        return 0.0

    def completed(self, version: int) -> Published:
        """A published version, once it is complete; asked of rank 0 alone."""
        assert self._publisher is not None, "rank 0 publishes"
        return self._publisher.completed(version)

    def save(self, path: Path) -> None:
        """Begin a checkpoint; the next step may begin at once."""
        self._learner.begin_save(path)

    def saved(self) -> None:
        """Return when that checkpoint is complete on disk."""
        self._learner.finish_save()


def _real_learner(
    config: RunConfig, spec: LearnerSpec, note: Callable[[LearnerProgress], None]
) -> tuple[Learner, LearnerStarted]:
    device = config.learner_device.value
    model = config.model
    refers_to_start = config.algorithm.refers and config.algorithm.reference is None
    begins = spec.checkpoint is None or refers_to_start or config.learner.lora is not None
    if config.warm_start is not None and begins:
        if spec.rank == 0:
            _warm_start(config, note)  # the other ranks wait for it in `join_group`
        model = start_model(config)
    mesh = join_group(spec.rendezvous, rank=spec.rank, world_size=config.learner.world_size, device_type=device)
    learner = Learner(
        model,
        config.learner,
        config.algorithm,
        temperature=config.rollout.sampling.temperature,
        seed=config.seed,
        num_steps=config.steps,
        mesh=mesh,
    )
    num_parameters = sum(parameter.numel() for parameter in learner.model.parameters())
    kernel, sizes = choose_kernel(torch.device(device)).value, learner.model.config
    return learner, LearnerStarted(num_parameters, kernel, sizes.hidden_size, sizes.num_hidden_layers)


def start_model(config: RunConfig) -> ModelConfig:
    """Model that RL begins with: the configured one, or its warm start, which must be in the cache."""
    if config.warm_start is None:
        return config.model
    key = cache_key(config.model, config.warm_start, chat=config.data.chat, seed=config.seed)
    return ModelConfig(path=config.warm_start.cache / key)


def _emulated_learner(emulation: EmulationConfig) -> tuple[EmulatedLearner, LearnerStarted]:
    times = read_profile(emulation.profile).learner
    learner = EmulatedLearner(times, devices=emulation.learner_devices, compression=emulation.compression)
    return learner, LearnerStarted(times.num_parameters, "emulated", times.hidden_size, times.num_layers)


def _warm_start(config: RunConfig, note: Callable[[LearnerProgress], None]) -> None:
    """Put the warm-started model into the cache, if it is not there."""
    settings = config.warm_start
    assert settings is not None, "called only where a warm start is configured"
    encoder = PromptEncoder(
        load_tokenizer(config.model.path), config.model.path, config.data.chat, config.environment
    )
    source = DataSource("warm_start.data", settings.data)
    demonstrations = read_demonstrations(source, encoder=encoder, max_tokens=settings.tokens_per_step)
    examples = [Example(item.prompt_ids, item.response_ids) for item in demonstrations]

    def on_step(step: int, loss: float) -> None:
        note(LearnerProgress("warm start", step, settings.steps, loss))

    warm_start(config.model, settings, examples, chat=config.data.chat, seed=config.seed, on_step=on_step)
