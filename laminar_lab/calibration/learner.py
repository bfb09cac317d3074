"""Time learner steps on synthetic trajectories and fit `LearnerTimes`. Called by `laminar calibrate`.

Steps of few and many microbatches, of short and mixed sequences, take turns. Then each of a few steps publishes a
version to a relay and its child in processes of their own. The last version stays for the engine to load.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from laminar_lab.bench.relay_pair import WARM_VERSIONS, RelayPair
from laminar_lab.emulation.settings import LearnerTimes
from laminar_lab.step_time import LinearFit, TimedShape, fit
from laminar_py.config import ConfigError, RunConfig
from laminar_py.config.cluster import Device
from laminar_py.engines import served_dtype
from laminar_py.learner import Learner, join_group, leave_group
from laminar_py.learner.packing import pack, sequence_cost
from laminar_py.records import FinishReason, Trajectory
from laminar_py.records.host import Clock, SystemClock
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import Kind
from laminar_py.relay import generate_keys

MICROBATCHES = (1, 2, 4)  # of a step
SHORTER = 8  # `rollout.max_len` over the length of a short sequence
SIGMA = 0.99  # of log-normal mixed lengths, whose median is a short sequence
LEAST_S = 1e-12  # lower bound of a token's time, since the fit can be 0


@dataclass(frozen=True, slots=True)
class StepLengths:
    """Sequences of a step, e.g. `StepLengths("8192 tokens, short", [56, 56])`."""

    name: str
    lengths: Sequence[int]  # [S]


@dataclass(frozen=True, slots=True)
class MeasuredLearner:
    """Times of a learner, the fit of its steps, its versions, and the folder of the last version."""

    times: LearnerTimes
    steps: LinearFit
    versions: "MeasuredVersions"
    weights: Path


@dataclass(frozen=True, slots=True)
class MeasuredVersions:
    """Medians over published versions, each a learner step after the one before.

    E.g. `MeasuredVersions(3_090_000_000, publish_s=0.155, arrival_s=2.7)`.
    """

    num_bytes: int
    publish_s: float  # that the learner waits
    arrival_s: float  # from the begin of the publish until another process has verified the version

    @property
    def relay_bytes_per_s(self) -> float:
        """Bytes of a version over its time to another process."""
        return self.num_bytes / self.arrival_s


def check(config: RunConfig) -> None:
    """Raise `ConfigError` for a learner that cannot be measured."""
    if config.learner.world_size > 1:
        raise ConfigError(
            f"learner.world_size={config.learner.world_size}: one device is measured; set learner.world_size=1,"
            " with a model that fits there"
        )
    if config.algorithm.packed_columns:
        raise ConfigError(
            f"algorithm.name={config.algorithm.name}: trains on {config.algorithm.packed_columns[0].name},"
            " which made-up trajectories lack; set algorithm.name=grpo to measure"
        )


def measure_learner(
    config: RunConfig, clock: Clock, *, store: Path, repeats: int, log: Callable[[str], None]
) -> MeasuredLearner:
    """Measure a learner: medians of `repeats` rounds after a round for warming up.

    The last version stays in the folder `store`. Publishes count in seconds, whatever the `clock` of the steps.
    """
    log("learner: loads")
    with _open_learner(config) as learner:
        model = learner.model.config
        adapters = 0
        if config.learner.lora is not None:
            adapters = sum(one.numel() for one in learner.model.parameters() if one.requires_grad)
        num_parameters = sum(one.numel() for one in learner.model.parameters()) - adapters
        cost, share = learner.cost, learner.cost.attention_share
        chosen = choose_steps(max_len=config.rollout.max_len, max_tokens=config.packer.max_tokens)
        found: dict[str, list[float]] = {one.name: [] for one in chosen}
        for turn in range(repeats + 1):
            first = turn % len(chosen)
            for one in chosen[first:] + chosen[:first]:
                found[one.name].append(_step_s(config, learner, one, clock, share=share))
            log(f"learner: steps, round {turn} of {repeats}" if turn else "learner: warm")
        log("learner: versions")
        versions, weights = _measure_versions(config, learner, chosen[0], store, repeats=repeats, share=share)
    steps = fit([_timed(one, median(found[one.name][1:]), share=share) for one in chosen])
    optimizer_s, token_s = steps.coefficients
    times = LearnerTimes(
        train_tokens_per_s=1 / max(LEAST_S, token_s),
        num_parameters=num_parameters,
        num_active=round(cost.per_token / (4 if adapters else 6)),
        hidden_size=model.hidden_size,
        num_layers=model.num_hidden_layers,
        optimizer_s=optimizer_s,
        publish_s=versions.publish_s,
        adapters=adapters,
    )
    return MeasuredLearner(times, steps, versions, weights)


def choose_steps(*, max_len: int, max_tokens: int) -> list[StepLengths]:
    """Choose steps of one, two and four microbatches, of short and of log-normal lengths."""
    short, rng = max(2, max_len // SHORTER), np.random.default_rng(0)
    made = []
    for count in MICROBATCHES:
        tokens = count * max_tokens
        made.append(StepLengths(f"{tokens} tokens, short", [short] * (tokens // short)))
        drawn = np.clip(short * np.exp(SIGMA * rng.standard_normal(tokens // short)), 2, max_len).astype(int)
        mixed = drawn[np.cumsum(drawn) <= tokens].tolist()
        made.append(StepLengths(f"{tokens} tokens, mixed", mixed or [max_len]))
    return made


def _step_s(config: RunConfig, learner: Learner, one: StepLengths, clock: Clock, *, share: float) -> float:
    """Measure a step."""
    vocab = learner.model.config.vocab_size
    packed = pack(
        [make_trajectory(index, length, vocab=vocab) for index, length in enumerate(one.lengths)],
        max_tokens=config.packer.max_tokens,
        ranks=1,
        aggregation=config.algorithm.aggregation,
        attention_share=share,
    )
    began = clock.now()
    learner.step(packed.microbatches(0))
    return clock.now() - began


def _measure_versions(
    config: RunConfig, learner: Learner, one: StepLengths, store: Path, *, repeats: int, share: float
) -> tuple[MeasuredVersions, Path]:
    """Publish a version after each of some steps. Returns the medians, and the folder of the last version.

    The first few versions do not count: later versions are written over their pages.
    """
    dtype, clock = getattr(torch, served_dtype(config.model.path)), SystemClock()
    stalls: list[float] = []
    arrivals: list[float] = []
    with RelayPair(store / "relays", keys=generate_keys(), adapter_config=learner.adapter_config()) as pair:
        for _ in range(WARM_VERSIONS + repeats):
            _step_s(config, learner, one, clock, share=share)
            pair.await_spare()
            began = clock.now()
            stalls.append(pair.publish_sources(learner.sources(dtype=dtype, gather=False)))
            _, report = pair.await_last()
            arrivals.append(clock.now() - began)
        publish_s, arrival_s = median(stalls[WARM_VERSIONS:]), median(arrivals[WARM_VERSIONS:])
        return MeasuredVersions(report.num_bytes, publish_s=publish_s, arrival_s=arrival_s), pair.newest


def _timed(one: StepLengths, step_s: float, *, share: float) -> TimedShape:
    cost = sum(sequence_cost(length, attention_share=share) for length in one.lengths)
    return TimedShape(one.name, (1, cost), step_s)


def make_trajectory(index: int, length: int, *, vocab: int = 512, prompt: np.ndarray | None = None) -> Trajectory:
    """Make a finished trajectory of random tokens; the prompt is an eighth of its tokens, or `prompt`."""
    generator = np.random.default_rng(index)
    first = generator.integers(1, vocab, max(1, length // 8)).astype(np.int32) if prompt is None else prompt
    count = length - len(first)
    return Trajectory(
        id=f"t{index}.0",
        prompt_id=f"p{index}",
        group_id=f"t{index}",
        sample_index=0,
        kind=Kind.TRAIN,
        prompt_ids=first,
        response_ids=generator.integers(1, vocab, count).astype(np.int32),
        logprobs=np.zeros(count, np.float32),
        loss_mask=np.ones(count, np.bool_),
        spans=(Span(0, 0, count),),
        finish_reason=FinishReason.STOP,
        reward=1.0,
        advantage=float(generator.normal()),
    )


@contextmanager
def _open_learner(config: RunConfig) -> Iterator[Learner]:
    """Open the learner of a run without the other parts of the run."""
    if not config.learner.offload:
        torch.set_num_threads(1)  # as in a run
    with TemporaryDirectory(prefix="laminar-calibrate-") as folder:
        joins = config.learner_device is Device.CUDA
        mesh = join_group(f"{folder}/ranks", rank=0, world_size=1, device_type="cuda") if joins else None
        try:
            yield Learner(
                config.model,
                config.learner,
                config.algorithm,
                temperature=config.rollout.sampling.temperature,
                seed=config.seed,
                total_steps=config.steps,
                mesh=mesh,
            )
        finally:
            if joins:
                leave_group()
