"""Settings of emulated engines and learner, and of the parts that `laminar simulate` has no model of GPUs for."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.config.cluster import ClusterConfig, Device
from laminar_py.config.data import WarmStartConfig
from laminar_py.config.learner import LearnerConfig
from laminar_py.config.section import ConfigError, Count, Seconds, Section

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
