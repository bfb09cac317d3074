"""The request of a plan: a model, a fleet of GPUs, response lengths, the work of a step and a price. Pure."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from laminar_lab.emulation.settings import EmulationProfile
from laminar_lab.gpus import Gpu
from laminar_lab.model_shape import ModelShape
from laminar_lab.step_time import (
    LEARNER_MFU,
    arrival_s,
    engine_times,
    learner_times,
    version_bytes,
    with_passes,
)
from laminar_py.config import ConfigError
from laminar_py.config.learner import LearnerConfig
from laminar_py.config.replay import ReplayConfig
from laminar_py.learner.packing import RowSize, group_size

QUANTILES = 4000
DRAWN_GROUPS = 64  # whose prompts are shared, for a mean
P50, TAIL = 1500.0, 10.0  # of responses whose lengths nobody gives: tokens, and p99 over p50
P99 = NormalDist().inv_cdf(0.99)

Tokens = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Response lengths, log-normal and cut at `cap`, e.g. with p99 10 times p50:

    `Lengths(median=1500, sigma=0.99, cap=16384, prompt=400)`.
    """

    median: float  # tokens
    sigma: float  # of the logarithm
    cap: int
    prompt: int  # tokens of each prompt
    prompt_share: float = 0.0  # variance of log lengths between prompts, over their whole variance

    def __post_init__(self) -> None:
        if self.median > self.cap:
            raise ConfigError(
                f"p50={self.median:.0f}: lies beyond cap={self.cap}, a response's end; lower it, or raise cap"
            )

    @classmethod
    def of_percentiles(
        cls, p50: float | None, p99: float | None, *, cap: int, prompt: int, prompt_share: float = 0.0
    ) -> "Lengths":
        """Make lengths with these percentiles before the cut; None: the defaults, or a quarter of a low `cap`.

        Raises `ConfigError`.
        """
        p50 = p50 or min(P50, cap / 4)
        p99 = p99 or TAIL * p50
        if p99 < p50:
            raise ConfigError(f"p99={p99:g}: is below p50={p50:g}; give both in tokens")
        sigma = math.log(p99 / p50) / P99
        return cls(median=p50, sigma=sigma, cap=cap, prompt=prompt, prompt_share=prompt_share)

    @cached_property
    def quantiles(self) -> Tokens:
        """Ascending lengths at evenly spaced quantiles, [QUANTILES] tokens."""
        shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
        normal = NormalDist()
        drawn = np.array([normal.inv_cdf(share) for share in shares])
        return np.minimum(np.maximum(1.0, self.median * np.exp(self.sigma * drawn)), self.cap)

    @property
    def mean(self) -> float:
        """Mean tokens of a response."""
        return float(self.quantiles.mean())

    @property
    def mean_context(self) -> float:
        """Mean cached tokens of a running sequence; a long sequence counts more, since it runs longer."""
        return self.prompt + float((self.quantiles**2).mean()) / (2 * self.mean)

    @property
    def tail(self) -> float:
        """The 99th percentile over the median, after the cut."""
        p50, p99 = np.quantile(self.quantiles, (0.5, 0.99))
        return float(p99 / p50)

    @property
    def most(self) -> int:
        """Tokens of a prompt and the longest response."""
        return self.prompt + self.cap

    def longest_of(self, number: int) -> float:
        """Return the expected length of the longest of `number` responses, after the cut."""
        shares = np.arange(1, QUANTILES + 1) / QUANTILES
        weights = np.diff(shares**number, prepend=0.0)
        return float((self.quantiles * weights).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFleet:
    """Available GPUs, e.g. 3 nodes of 8: `GpuFleet(gpu=gpu_named("H100"), nodes=3, per_node=8)`."""

    gpu: Gpu
    nodes: int
    per_node: int
    network_bytes_per_s: float = 50e9  # from a node to others: 400 Gbit/s

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The inputs of a plan; the plan depends on nothing else."""

    model: str  # as the user named it
    shape: ModelShape
    fleet: GpuFleet
    lengths: Lengths
    prompts_per_step: int
    group_size: int
    learner: LearnerConfig  # a plan sets its `world_size`, `shard_ranks` and `recompute`
    shares: bool = True  # samples share their prompt in the learner
    has_critic: bool = False  # the learner trains a value model beside the policy
    replay_share: float = 0.0  # of a step's groups, at most (`buffer.replay.share`)
    max_staleness: int | None = 4  # learner steps
    reward_s: float = 0.05  # median from a response's end to its score
    mfu: float = LEARNER_MFU
    price: float | None = None  # of a GPU-hour
    measured: EmulationProfile | None = None  # replaces the rates of `step_time`

    def __post_init__(self) -> None:
        """Check the profile against the model. Raises `ConfigError` where layers or width differ."""
        if self.measured is None:
            return
        learner, shape = self.measured.learner, self.shape
        measured, model = (learner.num_layers, learner.hidden_size), (shape.num_hidden_layers, shape.hidden_size)
        if measured != model:
            raise ConfigError(
                f"--profile: it measured a model of {measured[0]} layers and width {measured[1]}, but"
                f" {self.model} has {model[0]} layers and width {model[1]}; name a profile of this"
                " model, or leave --profile out"
            )

    @property
    def trajectories_per_step(self) -> int:
        """Responses of a learner step."""
        return self.prompts_per_step * self.group_size

    @property
    def replayed_groups(self) -> int:
        """Groups of a learner step that replicas do not generate, since it replays them."""
        return ReplayConfig(share=self.replay_share).groups_of(self.prompts_per_step)

    @property
    def new_per_step(self) -> int:
        """Responses of a learner step that replicas generate."""
        return (self.prompts_per_step - self.replayed_groups) * self.group_size

    def learner_size(self, pack_tokens: int) -> RowSize:
        """Return the size of a step in rows of so many tokens, as the packer shares prompts in them."""
        lengths, number = self.lengths.quantiles + self.lengths.prompt, self.trajectories_per_step
        whole = RowSize(round(number * float(lengths.mean())), number * float((lengths**2).mean()))
        if not self.shares:
            return whole
        spared, groups = _spared(self.lengths, self.group_size, pack_tokens), self.prompts_per_step
        return RowSize(whole.tokens - groups * spared.tokens, whole.squares - groups * spared.squares)

    @property
    def publish_s(self) -> float:
        """Seconds from a learner step until every node has the new version."""
        return arrival_s(
            self.version_bytes,
            nodes=self.fleet.nodes,
            network_bytes_per_s=self.fleet.network_bytes_per_s,
            relay_bytes_per_s=None if self.measured is None else self.measured.relay_bytes_per_s,
        )

    @property
    def version_bytes(self) -> int:
        """Bytes of a version: of the adapters alone where the learner trains adapters."""
        return version_bytes(self._adapters or self.shape.total)

    @property
    def _adapters(self) -> int:
        """Parameters of the adapters; 0 where the learner trains all weights."""
        lora = self.learner.lora
        return 0 if lora is None else self.shape.adapters(lora)

    def profile(self, tensor_parallel: int) -> EmulationProfile:
        """Return the measured times, or the computed times of such a replica and of a learner GPU."""
        shape, gpu, adapters = self.shape, self.fleet.gpu, self._adapters
        found = self.measured or EmulationProfile(
            engine=engine_times(shape, gpu, tensor_parallel=tensor_parallel, adapters=adapters),
            learner=learner_times(shape, gpu, mfu=self.mfu, adapters=adapters),
        )
        return found.model_copy(update={"learner": with_passes(found.learner, critic=self.has_critic)})

    def emulated_engine(self, *, learner_devices: int, start_spread_s: float = 0.0) -> dict[str, object]:
        """Settings of `rollout.engine` that emulate engines with these lengths, and a learner on some GPUs."""
        lengths = self.lengths
        start_s = None if self.measured is None else self.measured.engine.start_s
        return {
            "kind": "emulated",
            "profile": "of the plan",
            "start_spread_s": start_spread_s,
            "learner_devices": learner_devices,
            "median_tokens": max(1, round(lengths.median)),
            "sigma": lengths.sigma,
            "prompt_share": lengths.prompt_share,
            "simulation": {
                "prompt_tokens": lengths.prompt,
                "reward_median_s": self.reward_s,
                "publish_s": self.publish_s,
                "shares_prompts": self.shares,
            }
            | ({} if start_s is None else {"restart_s": start_s}),
        }


@lru_cache
def _spared(lengths: Lengths, samples: int, pack_tokens: int) -> RowSize:
    """Return how much smaller a group is for sharing its prompt: the mean of some groups with drawn lengths."""
    drawn = np.random.default_rng(0).choice(lengths.quantiles, (DRAWN_GROUPS, samples)).astype(int).tolist()
    apart, packed = (
        [group_size(each, prompt=lengths.prompt, max_tokens=pack_tokens, shares=shares) for each in drawn]
        for shares in (False, True)
    )
    tokens = sum(size.tokens for size in apart) - sum(size.tokens for size in packed)
    squares = sum(size.squares for size in apart) - sum(size.squares for size in packed)
    return RowSize(round(tokens / DRAWN_GROUPS), squares / DRAWN_GROUPS)
