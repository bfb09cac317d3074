"""Times of a learner, measured on steps of trajectories that nobody generated. Called by `laminar calibrate`.

Steps of a few and of many microbatches, of short and of mixed sequences, take turns; each ends with the copy of
the weights that a publication makes, and the last leaves a version for an engine to load.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from laminar_lab.calibration.fit import LinearFit, TimedShape, fit
from laminar_lab.calibration.trajectories import make_trajectory
from laminar_py.config import ConfigError, RunConfig
from laminar_py.config.cluster import Device
from laminar_py.config.emulation import LearnerTimes
from laminar_py.engines import served_dtype
from laminar_py.learner import Learner, join_group, leave_group
from laminar_py.learner.packing import attention_share, pack, sequence_cost
from laminar_py.records.host import Clock
from laminar_py.relay import Publisher, folder_name

MICROBATCHES = (1, 2, 4)  # of a step
SHORTER = 8  # times that a short sequence is shorter than `rollout.max_len`
SIGMA = 0.99  # of the lengths of mixed sequences, whose median is a short one
LEAST_S = 1e-12  # that a token is said to take at least


@dataclass(frozen=True, slots=True)
class StepLengths:
    """Sequences of a step, e.g. `StepLengths("8192 tokens, short", [56, 56])`."""

    name: str
    lengths: Sequence[int]  # [S]


@dataclass(frozen=True, slots=True)
class MeasuredLearner:
    """Times of a learner, the fit of its steps, and a folder of weights as it publishes them."""

    times: LearnerTimes
    steps: LinearFit
    weights: Path


def check(config: RunConfig) -> None:
    """Refuse a learner whose steps are not measured."""
    if config.learner.world_size > 1:
        raise ConfigError(
            f"learner.world_size={config.learner.world_size}: one device is measured; set learner.world_size=1,"
            " with a model that fits there"
        )
    if config.algorithm.packed_columns:
        raise ConfigError(
            f"algorithm.name={config.algorithm.name}: trains on {config.algorithm.packed_columns[0].name},"
            " which no made-up trajectory has; set algorithm.name=grpo to measure"
        )


def measure_learner(
    config: RunConfig, clock: Clock, *, store: Path, repeats: int, tell: Callable[[str], None]
) -> MeasuredLearner:
    """Medians of `repeats` rounds, after one that does not count; the last version stays in `store`."""
    tell("learner: loads")
    with _opened(config) as learner, _publisher(store, learner) as publisher:
        model = learner.model.config
        num_parameters = sum(parameter.numel() for parameter in learner.model.parameters())
        share = attention_share(
            hidden_size=model.hidden_size, num_layers=model.num_hidden_layers, num_parameters=num_parameters
        )
        chosen = steps_of(max_len=config.rollout.max_len, max_tokens=config.packer.max_tokens)
        found: dict[str, list[float]] = {one.name: [] for one in chosen}
        version = 0
        for turn in range(repeats + 1):
            first = turn % len(chosen)
            for one in chosen[first:] + chosen[:first]:
                version += 1
                step_s = _step_s(config, learner, publisher, one, clock, version=version, share=share)
                found[one.name].append(step_s)
            tell(f"learner: steps, round {turn} of {repeats}" if turn else "learner: warm")
        publisher.completed(version)
    steps = fit([_timed(one, median(found[one.name][1:]), share=share) for one in chosen])
    optimizer_s, token_s = steps.coefficients
    times = LearnerTimes(
        train_tokens_per_s=1 / max(LEAST_S, token_s),
        num_parameters=num_parameters,
        hidden_size=model.hidden_size,
        num_layers=model.num_hidden_layers,
        optimizer_s=optimizer_s,
    )
    return MeasuredLearner(times, steps, store / folder_name(version))


def steps_of(*, max_len: int, max_tokens: int) -> list[StepLengths]:
    """Steps of one, two and four microbatches of short, or of log-normal lengths."""
    short, rng = max(2, max_len // SHORTER), np.random.default_rng(0)
    made = []
    for count in MICROBATCHES:
        tokens = count * max_tokens
        made.append(StepLengths(f"{tokens} tokens, short", [short] * (tokens // short)))
        drawn = np.clip(short * np.exp(SIGMA * rng.standard_normal(tokens // short)), 2, max_len).astype(int)
        mixed = drawn[np.cumsum(drawn) <= tokens].tolist()
        made.append(StepLengths(f"{tokens} tokens, mixed", mixed or [max_len]))
    return made


def _step_s(
    config: RunConfig,
    learner: Learner,
    publisher: Publisher,
    one: StepLengths,
    clock: Clock,
    *,
    version: int,
    share: float,
) -> float:
    """Seconds of a step and of the copy of its weights."""
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
    publisher.publish(version, learner.named_tensors(dtype=getattr(torch, served_dtype(config.model.path))))
    return clock.now() - began


def _timed(one: StepLengths, step_s: float, *, share: float) -> TimedShape:
    cost = sum(sequence_cost(length, attention_share=share) for length in one.lengths)
    return TimedShape(one.name, (1, cost), step_s)


@contextmanager
def _opened(config: RunConfig) -> Iterator[Learner]:
    """The learner of a run, alone; its state is nobody's."""
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
                num_steps=config.steps,
                mesh=mesh,
            )
        finally:
            if joins:
                leave_group()


@contextmanager
def _publisher(store: Path, learner: Learner) -> Iterator[Publisher]:
    publisher = Publisher(store, adapter_config=learner.adapter_config())
    try:
        yield publisher
    finally:
        publisher.close()
