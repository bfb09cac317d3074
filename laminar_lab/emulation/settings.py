"""Settings of `rollout.engine` with `kind: emulated`, and the profile: times of a GPU and a model.

`laminar_py.config.engine` validates the settings through the backend. The profile is read before a run and in each
emulated process.
"""

import heapq
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from laminar_py.config import ConfigError, Count, EngineConfig, RunConfig, Seconds, Section
from laminar_py.config.engine import EmulatedFleet
from laminar_py.config.loading import load_settings
from laminar_py.learner.packing import RowSize, attention_share

Time = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Extra = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1)]


class EngineTimes(Section):
    """Times of an engine. A decoding step of N sequences over T tokens of KV takes
    `step_s + sequence_s * N + kv_token_s * T`."""

    step_s: Time
    """Seconds of a step on an empty cache, which reads the weights."""
    sequence_s: Extra = 0.0
    """Seconds that each sequence of a batch adds."""
    kv_token_s: Extra
    """Seconds to read the keys and values of one token."""
    prefill_tokens_per_s: Time
    """Tokens prefilled in a second; no decoding step runs meanwhile."""
    load_s: Extra
    """Seconds to load new weights from this host's memory."""
    hand_over_s: Extra = 0.3
    """Seconds until an engine on shared GPUs has given the memory of its KV cache back, and again until it has the
    memory. The learner frees its memory meanwhile. The default is a guess, not a measurement."""
    reserve_tokens: Size
    """Tokens that must be free for the growth of a request when it is admitted."""
    gpus: Size = 1
    """GPUs of the measured replica; only `laminar plan` reads it."""
    start_s: Extra | None = None
    """Seconds from an engine's start until it serves its first weights, the `restart_s` of `laminar simulate
    --gpu`. `null`: not measured."""

    def seconds(self, steps: int, *, running: int, kv_used: int) -> float:
        """Seconds of `steps` decoding steps that begin with `kv_used` tokens.

        Each step adds one token for each running sequence.
        """
        first_s = self.step_s + self.sequence_s * running + self.kv_token_s * kv_used
        grown = running * steps * (steps - 1) / 2
        return steps * first_s + self.kv_token_s * grown

    def steps_within(self, seconds: float, *, running: int, kv_used: int) -> int:
        """Largest number of decoding steps that takes at most `seconds`: the inverse of `seconds`."""
        first_s, half = self.seconds(1, running=running, kv_used=kv_used), self.kv_token_s * running / 2
        if first_s > seconds:
            return 0
        slope = first_s - half
        divisor = slope + math.sqrt(slope * slope + 4 * half * seconds)
        steps = int(2 * seconds / divisor) if divisor > 0 else 0
        while self.seconds(steps + 1, running=running, kv_used=kv_used) <= seconds:
            steps += 1
        while steps and self.seconds(steps, running=running, kv_used=kv_used) > seconds:
            steps -= 1
        return steps


class LearnerTimes(Section):
    """Times of a learner, on devices that divide the microbatches of a step among them."""

    train_tokens_per_s: Time
    """Tokens of short sequences that one device trains on in a second, recomputation included."""
    num_parameters: Size
    """Of the model: a version has all of them, unless `adapters` are published."""
    num_active: Size | None = None
    """Parameters that multiply a token; `null`: all of them. With the next two this gives the extra cost of
    attention in long sequences."""
    hidden_size: Size
    """Of the model."""
    num_layers: Size
    """Of the model."""
    optimizer_s: Extra
    """Seconds of a step that do not depend on its size: optimizer, collectives."""
    publish_s: Extra = 0.0
    """Seconds that a publish stops the learner; 0: `optimizer_s` has them, too."""
    adapters: Annotated[int, Field(ge=0)] = 0
    """Parameters of the adapters, if only these are trained and published; 0: all weights are."""

    @property
    def attention_share(self) -> float:
        """Cost of a token pair's attention, in units of a token's linear layers."""
        return attention_share(
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_parameters=self.num_active or self.num_parameters,
            frozen=self.adapters > 0,
        )

    @property
    def num_published(self) -> int:
        """Parameters in a version."""
        return self.adapters or self.num_parameters

    def step_s(self, sizes: Iterable[RowSize], *, devices: int) -> float:
        """Seconds of an optimizer step: each microbatch runs on one device, and the busiest device counts.

        A publish comes on top. `sizes` are the microbatches'.
        """
        costs = [size.tokens + self.attention_share * size.squares for size in sizes]
        busy = [0.0] * devices
        for cost in sorted(costs, reverse=True):
            heapq.heapreplace(busy, busy[0] + cost)  # on the least busy device
        return self.optimizer_s + max(busy) / self.train_tokens_per_s


class EmulationProfile(Section):
    """A GPU and a model, e.g. `configs/emulation/h100_7b.yaml`."""

    engine: EngineTimes
    """Of each replica."""
    learner: LearnerTimes
    """Of the learner."""
    relay_bytes_per_s: Time | None = None
    """Bytes of a version over the seconds from its publish until another process has verified it, as a delta.
    `null`: not measured."""
    link_bytes_per_s: Time | None = None
    """Bytes that a learner GPU sends to GPUs of its node in a collective, a second. `null`: by the data sheet."""
    network_bytes_per_s: Time | None = None
    """The same across nodes; bounds what the plan's network gives. `null`: not measured."""


def read_profile(path: Path, *, setting: str = "rollout.engine.profile") -> EmulationProfile:
    """Read the profile in a YAML file that `setting` names. Raises `ConfigError`."""
    if not path.is_file():
        raise ConfigError(f"{setting}={path}: no such file; name one such as configs/emulation/h100_7b.yaml")
    try:
        return load_settings(EmulationProfile, path, [], help_at="laminar_lab/emulation/settings.py")
    except ConfigError as error:
        raise ConfigError(f"{setting}={path}: {error}") from None


SHORTEST = 16  # tokens that the model has in any response


class TurnsConfig(Section):
    """Turns of emulated trajectories. Between two turns of the model an emulated environment works and writes
    tokens. The model's tokens are as many in all as in one turn."""

    count: Annotated[int, Field(ge=2, le=SHORTEST)]
    """Turns of the model in each trajectory; their lengths are random."""
    median_s: Seconds
    """Median of the log-normal time that an environment works between two turns, in emulated seconds."""
    p95_s: Seconds
    """Its 95th percentile, in emulated seconds."""
    observation_tokens: Count = 64
    """Tokens that an environment writes between two turns; they count for `rollout.sampling.max_new_tokens`."""

    @property
    def observed_tokens(self) -> int:
        """Most tokens that environments write in a trajectory."""
        return (self.count - 1) * self.observation_tokens

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.p95_s < self.median_s:
            raise ConfigError(
                f"rollout.engine.turns.p95_s={self.p95_s:g}: below median_s={self.median_s:g}; raise it"
            )
        return self


Portion = Annotated[float, Field(ge=0, le=1)]
Delay = Annotated[float, Field(ge=0, le=86_400)]  # a simulation steps through each second


class SimulationConfig(Section):
    """Times of simulated parts other than engines and learner; `laminar simulate` alone reads them. All are real
    seconds of the run."""

    prompt_tokens: Count = 400
    """Tokens of a prompt."""
    shares_prompts: bool = True
    """Samples share their prompt in the learner. False, as where a run records experts: each has its own."""
    solved: Portion = 0.5
    """Share of responses with reward 1; the others have reward 0."""
    reward_median_s: Delay = 0.05
    """Median of the log-normal time that scoring a response takes."""
    reward_sigma: Delay = 0.0
    """Standard deviation of its logarithm."""
    scorers: Count | None = None
    """Responses that are scored at a time; others wait in a queue. `null`: no limit."""
    publish_s: Delay | None = None
    """Seconds from a learner's step until the new version is in the memory of every replica's host, or, with
    `link_gbit_per_s`, of the learner's host, from where it goes down the tree. `null`: by the profile's
    `relay_bytes_per_s`; 0.5 if the profile has none, or with `link_gbit_per_s`."""
    link_gbit_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Bandwidth between two hosts, in emulated seconds. A version, with 2 bytes for each parameter of the profile,
    goes down the tree of `relay.fanout`; a replica loads it when its host has all of it. `null`: every host has
    it after `publish_s`."""
    replicas_per_host: Count = 8
    """Replicas that share a host and its relay, e.g. 2 if each has four of eight GPUs."""
    replica_mtbf_s: Seconds | None = None
    """Mean of the exponential time between two crashes of a replica's process. Its trajectories continue
    elsewhere, from the end of its journal (`rollout.partial_interval_s`). `null`: no replica crashes."""
    restart_s: Delay = 60.0
    """Seconds from a replica's crash until it serves the newest weights again."""
    hop_s: Delay = 0.02
    """Seconds from sending a report until the controller reads it: an assumption, not a measurement."""
    order_s: Delay = 0.01
    """Seconds from the controller to its replica for an order: an assumption, too."""


class EmulationConfig(EngineConfig):
    """Engines and a learner that wait for the time that GPUs would take, and compute nothing. They measure
    schedules with the real controller, processes, relays and ledger."""

    kind: str = "emulated"
    """See `rollout.engine`."""
    profile: Path
    """YAML with the times of a GPU and a model, e.g. `configs/emulation/h100_7b.yaml`. `rollout.kv_capacity` and
    `rollout.max_batch` limit the emulated engine too."""
    compression: Annotated[float, Field(ge=1, le=20)] = 1.0
    """Emulated seconds in one second; all other settings are in real seconds."""
    start_spread_s: Annotated[float, Field(ge=0)] = 0.0
    """Emulated seconds over which replicas start one after another; 0: all start at once."""
    learner_devices: Count = 1
    """GPUs that share a learner step."""
    engine_devices: Count = 1
    """GPUs of each replica. With `cluster.share` replicas have the learner's GPUs as far as these go."""
    median_tokens: Count = 1500
    """Median of response lengths, which are log-normal and cut at `rollout.sampling.max_new_tokens`."""
    sigma: Annotated[float, Field(ge=0)] = 0.99
    """Standard deviation of their logarithm; 0.99 makes p99 10 times the median."""
    prompt_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the variance between prompts, in the logarithm of lengths; 0: responses to one prompt differ as
    much as responses to different prompts."""
    turns: TurnsConfig | None = None
    """Turns that environments answer, or none: a response is one turn."""
    simulation: SimulationConfig = SimulationConfig()
    """Times of simulated parts, for `laminar simulate` alone."""

    def most_sampled(self, cap: int) -> int:
        """Most tokens that the model samples in a response of `cap` tokens."""
        return cap if self.turns is None else cap - self.turns.observed_tokens

    @property
    def yields_cpus(self) -> bool:
        """False, since its timers must fire on time."""
        return False

    @property
    def emulates(self) -> EmulatedFleet:
        """See `EngineConfig.emulates`."""
        return EmulatedFleet(
            learner_devices=self.learner_devices,
            engine_devices=self.engine_devices,
            compression=self.compression,
            has_turns=self.turns is not None,
        )


def emulation_of(config: RunConfig) -> EmulationConfig:
    """Return the section `rollout.engine` of a run with emulated engines."""
    section = config.rollout.engine
    assert isinstance(section, EmulationConfig), section
    return section
