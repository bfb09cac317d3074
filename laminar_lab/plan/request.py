"""Request of a plan: a model, a fleet of GPUs, lengths, the work of a step, and what it may cost. Pure."""

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from laminar_py.config import ConfigError, EmulationProfile
from laminar_py.config.learner import LearnerConfig
from laminar_py.runtime.preflight import Gpu, ModelShape

QUANTILES = 4000
P99 = NormalDist().inv_cdf(0.99)

Tokens = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of responses, log-normal and cut, e.g. p99 10 times p50:

    `Lengths(median=1500, sigma=0.99, cap=16384, prompt=400)`.
    """

    median: float  # tokens
    sigma: float  # of their logarithm
    cap: int
    prompt: int  # tokens of each prompt
    prompt_share: float = 0.0  # of the variance of the logarithm, which is between prompts

    def __post_init__(self) -> None:
        if self.median > self.cap:
            raise ConfigError(
                f"p50={self.median:.0f}: lies beyond cap={self.cap}, where responses are cut; raise cap"
            )

    @classmethod
    def of_percentiles(
        cls, p50: float, p99: float, *, cap: int, prompt: int, prompt_share: float = 0.0
    ) -> "Lengths":
        """Lengths with these percentiles before they are cut. Raises `ConfigError`."""
        if p99 < p50:
            raise ConfigError(f"p99={p99:g}: is below p50={p50:g}; give both in tokens")
        sigma = math.log(p99 / p50) / P99
        return cls(median=p50, sigma=sigma, cap=cap, prompt=prompt, prompt_share=prompt_share)

    @cached_property
    def quantiles(self) -> Tokens:
        """Lengths at so many evenly spaced quantiles, ascending, [QUANTILES] tokens."""
        shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
        normal = NormalDist()
        drawn = np.array([normal.inv_cdf(share) for share in shares])
        return np.minimum(np.maximum(1.0, self.median * np.exp(self.sigma * drawn)), self.cap)

    @property
    def mean(self) -> float:
        """Tokens of a response."""
        return float(self.quantiles.mean())

    @property
    def mean_context(self) -> float:
        """Tokens that a running sequence has in its cache, over time: long ones run longer."""
        return self.prompt + float((self.quantiles**2).mean()) / (2 * self.mean)

    @property
    def most(self) -> int:
        """Tokens of the longest prompt and response."""
        return self.prompt + self.cap

    def longest_of(self, number: int) -> float:
        """Mean of the longest of so many responses, from their distribution as it is cut."""
        shares = np.arange(1, QUANTILES + 1) / QUANTILES
        weights = np.diff(shares**number, prepend=0.0)
        return float((self.quantiles * weights).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFleet:
    """GPUs that may be used, e.g. 3 nodes of 8: `GpuFleet(gpu=gpu_named("H100"), nodes=3, per_node=8)`."""

    gpu: Gpu
    nodes: int
    per_node: int
    network_bytes_per_s: float = 50e9  # of a node, to others: 400 Gbit/s

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Everything that decides which placement is best."""

    model: str  # as it was named
    shape: ModelShape
    fleet: GpuFleet
    lengths: Lengths
    prompts_per_step: int
    group_size: int
    learner: LearnerConfig  # but for its ranks and what they compute again
    max_staleness: int | None = 4  # learner steps
    reward_s: float = 0.05  # median from a response's end to its score
    mfu: float = 0.4  # of the learner
    price: float | None = None  # of a GPU-hour
    measured: EmulationProfile | None = None  # takes the place of the scaling rules

    def __post_init__(self) -> None:
        if self.measured is None:
            return
        learner, shape = self.measured.learner, self.shape
        told, has = (learner.num_layers, learner.hidden_size), (shape.num_hidden_layers, shape.hidden_size)
        if told != has:
            raise ConfigError(
                f"--profile: is of a model of {told[0]} layers {told[1]} wide, and {self.model} has {has[0]} of"
                f" {has[1]}; name the profile of this model, or leave it out"
            )

    @property
    def trajectories_per_step(self) -> int:
        """Responses that a learner step trains on."""
        return self.prompts_per_step * self.group_size
