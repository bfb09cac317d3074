"""Settings of emulated engines and learner, and of the parts that `laminar simulate` has no model of GPUs for."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.config.cluster import ClusterConfig, Device
from laminar_py.config.data import WarmStartConfig
from laminar_py.config.learner import LearnerConfig
from laminar_py.config.section import ConfigError, Count, Seconds, Section

Time = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Extra = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of decoding steps, as in `EngineTimes`, in plain numbers: an engine asks at every event."""

    step_s: float
    sequence_s: float
    kv_token_s: float

    def seconds(self, steps: int, *, running: int, kv_used: int) -> float:
        """Seconds of `steps` steps that begin with `kv_used` tokens and add one for each of `running`."""
        first_s = self.step_s + self.sequence_s * running + self.kv_token_s * kv_used
        grown = running * steps * (steps - 1) / 2
        return steps * first_s + self.kv_token_s * grown

    def within(self, seconds: float, *, running: int, kv_used: int) -> int:
        """The most steps that take at most `seconds`."""
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


class EngineTimes(Section):
    """Times of an engine. A decoding step of N sequences over T tokens of KV takes
    `step_s + sequence_s * N + kv_token_s * T`."""

    step_s: Time
    """A step on an empty cache: what reading the weights takes, seconds."""
    sequence_s: Extra = 0.0
    """What each sequence of a batch adds, seconds."""
    kv_token_s: Extra
    """Reading the keys and values of one token, seconds."""
    prefill_tokens_per_s: Time
    """Tokens put into the cache in a second, during which no step is made."""
    load_s: Extra
    """Taking up new weights that lie in this host's memory, seconds."""
    reserve_tokens: Size
    """Room that must be free for the growth of a request when it is admitted, in tokens."""
    gpus: Size = 1
    """GPUs of the one replica that these times are of; only `laminar plan` reads it."""

    @property
    def steps(self) -> "StepTimes":
        """Arithmetic of its decoding steps."""
        return StepTimes(self.step_s, self.sequence_s, self.kv_token_s)

    def slower(self, times: float) -> "EngineTimes":
        """Times of an engine that computes for so many times as long, e.g. 1.5; loads are as fast."""
        return self.model_copy(
            update={
                "step_s": self.step_s * times,
                "sequence_s": self.sequence_s * times,
                "kv_token_s": self.kv_token_s * times,
                "prefill_tokens_per_s": self.prefill_tokens_per_s / times,
            }
        )


class LearnerTimes(Section):
    """The learner, on devices that divide the microbatches of a step among them."""

    train_tokens_per_s: Time
    """Tokens of short sequences that one device trains on in a second, recomputation and all included."""
    num_parameters: Size
    """Of the model; with the next two it says how much more attention makes of a long sequence."""
    hidden_size: Size
    """Of the model."""
    num_layers: Size
    """Of the model."""
    optimizer_s: Extra
    """What a step takes whatever its size: optimizer, collectives and copy of the weights, seconds."""


class EmulationProfile(Section):
    """A GPU and a model, e.g. `configs/emulation/h100_7b.yaml`."""

    engine: EngineTimes
    """Of each replica."""
    learner: LearnerTimes
    """Of the learner."""


EMULATED = "emulated"  # the backend
SHORTEST = 16  # tokens that the model has in any response


class TurnsConfig(Section):
    """Turns of emulated trajectories. The model has as many tokens in all as it would have in one turn; between
    two turns an emulated environment works, and writes."""

    count: Annotated[int, Field(ge=2, le=SHORTEST)]
    """Turns of the model in each trajectory, of lengths that are drawn."""
    median_s: Seconds
    """Median of the time that an environment works between two turns, log-normal, in emulated seconds."""
    p95_s: Seconds
    """Its 95th percentile, in emulated seconds."""
    observation_tokens: Count = 64
    """Tokens that an environment writes between two turns. `rollout.sampling.max_new_tokens` counts them."""

    @property
    def observed_tokens(self) -> int:
        """Tokens of a trajectory that environments write at most."""
        return (self.count - 1) * self.observation_tokens

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.p95_s < self.median_s:
            raise ConfigError(
                f"emulation.turns.p95_s={self.p95_s:g}: is below median_s={self.median_s:g}; raise it"
            )
        return self


class EmulationConfig(Section):
    """Engines and a learner that take the time which GPUs would take, and compute nothing: for measuring
    schedules, with the real controller, processes, relays and ledger."""

    profile: Path
    """YAML with the times of a GPU and a model, e.g. `configs/emulation/h100_7b.yaml`; `rollout.kv_capacity` and
    `rollout.max_batch` bound the engine as ever."""
    compression: Annotated[float, Field(ge=1, le=20)] = 1.0
    """Emulated seconds in one second; all other settings are in real seconds."""
    start_spread_s: Annotated[float, Field(ge=0)] = 0.0
    """Emulated seconds over which the replicas begin, one after another; 0: all at once, in step at first."""
    learner_devices: Count = 1
    """GPUs that share a learner step."""
    median_tokens: Count = 1500
    """Median of the response lengths, which are log-normal and cut at `rollout.sampling.max_new_tokens`."""
    sigma: Annotated[float, Field(ge=0)] = 0.99
    """Standard deviation of their logarithm; 0.99 makes p99 10 times the median."""
    prompt_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the variance of the logarithm of lengths that is between prompts; 0: responses to a prompt differ
    as those to any."""
    turns: TurnsConfig | None = None
    """Turns that environments answer, or none: a response is one turn."""

    def most_sampled(self, cap: int) -> int:
        """Tokens of a response that the model has at most, where all of it has `cap`."""
        return cap if self.turns is None else cap - self.turns.observed_tokens


def check_turns(emulation: EmulationConfig, caps: Iterable[int]) -> None:
    """Refuse responses whose cap leaves the model nothing beside what environments write."""
    for cap in caps:
        if emulation.turns is not None and emulation.most_sampled(cap) < SHORTEST:
            raise ConfigError(
                f"emulation.turns.observation_tokens={emulation.turns.observation_tokens}: leaves the model fewer"
                f" than {SHORTEST} tokens of max_new_tokens={cap}; lower it or count, or raise max_new_tokens"
            )


def choose_engine(tree: object) -> object:
    """Raw settings of a run, whose engine is the emulated one where they have the section `emulation`."""
    if not isinstance(tree, dict) or tree.get("emulation") is None:
        return tree
    rollout = tree.get("rollout", {})
    engine = rollout.get("engine", {}) if isinstance(rollout, dict) else None
    if not isinstance(engine, dict) or engine.get("kind", "local") != "local":
        return tree
    return {**tree, "rollout": {**rollout, "engine": {**engine, "kind": EMULATED}}}


def check_emulation(
    kind: str,
    algorithm: AlgorithmConfig,
    learner: LearnerConfig,
    cluster: ClusterConfig,
    warm_start: WarmStartConfig | None,
) -> None:
    """Refuse engines that compute, and what only a learner with a model can do."""
    if kind != EMULATED:
        raise ConfigError(
            f"rollout.engine.kind={kind}: emulation replaces the engines; leave it out, or the section emulation"
        )
    if warm_start is not None:
        raise ConfigError(
            f"warm_start.data={warm_start.data.path}: an emulated learner has no model to warm up;"
            " leave warm_start out"
        )
    if algorithm.refers_in_stage:
        raise ConfigError(
            "algorithm.reference_pass=stage: an emulated learner has no reference model; leave it out"
        )
    if learner.world_size > 1 or cluster.learner_device is Device.CUDA:
        raise ConfigError(
            f"learner.world_size={learner.world_size} cluster.learner_device={cluster.learner_device}: an emulated"
            " learner is one process without a GPU; set emulation.learner_devices instead"
        )


Portion = Annotated[float, Field(ge=0, le=1)]
Delay = Annotated[float, Field(ge=0, le=86_400)]  # of which a simulation lives through each second


class SimulationConfig(Section):
    """Times of the parts that a simulation has no model of GPUs for; engines and learner are in `emulation`. All
    in seconds of the run, as everything but `emulation` is."""

    prompt_tokens: Count = 400
    """Tokens of a prompt."""
    solved: Portion = 0.5
    """Share of responses with reward 1; the others have 0."""
    reward_median_s: Delay = 0.05
    """Median of the time that a response's score takes, log-normal."""
    reward_sigma: Delay = 0.0
    """Standard deviation of its logarithm."""
    scorers: Count | None = None
    """Responses that are scored at a time; others wait, first come first served. `null`: no limit."""
    publish_s: Delay = 0.5
    """From a learner's step to the new version in the memory of every replica's host; with `link_gbit_per_s` in
    that of the learner's host, from which it travels on."""
    link_gbit_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """What a host passes on to one other, in seconds of the GPUs: a version, 2 bytes for each parameter of the
    profile, goes down the tree of `relay.topology`, and a replica may load it when all of it is on its host.
    `null`: every host has it after `publish_s`."""
    replicas_per_host: Count = 8
    """Replicas that share a host, and the relay on it; e.g. 2 where each has four of eight GPUs."""
    replica_mtbf_s: Seconds | None = None
    """Mean time between failures of one replica, whose process dies then, exponential. What it had goes on
    elsewhere, from where its journal (`rollout.partial_interval_s`) ends. `null`: none fails."""
    restart_s: Delay = 60.0
    """From a replica's failure until it serves the newest weights again."""
    hop_s: Delay = 0.02
    """A report's way to the controller and onto its desk: an assumption, not measured by itself."""
    order_s: Delay = 0.01
    """An order's way from the controller to its replica: an assumption, too."""
    cores: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Cores that engines, learner and all else share, where they compute on CPUs: one each at most, the engines
    what the others leave; 1.5 where other work takes half of one. Times in the profile are then CPU seconds. None:
    each has what it needs."""
    trajectory_cpu_s: Delay = 0.0
    """With `cores`: CPU seconds that a trajectory takes of all but engines and learner."""
