"""Seconds of decode steps, learner steps and publications: one model for planner, simulator and calibration.

- A decode step of N sequences over T tokens of KV cache takes `step_s + sequence_s * N + kv_token_s * T`.
- A learner step takes `optimizer_s`, and the cost of its tokens over `train_tokens_per_s`; attention makes a token
  of a long sequence cost more (`laminar_py.learner.packing.sequence_cost`). A publish stops it for `publish_s`.
- A version takes its bytes over the slowest link, or travels by the relay's own cost model.

`EngineTimes` and `LearnerTimes` in `laminar_lab/emulation/settings.py` hold the coefficients, and the emulated
engine and learner compute with the same formulas. The coefficients come from measurements (`fit`) or from the
rates below over the data sheet of a GPU (`engine_times`, `learner_times`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from laminar_lab.broadcast import Broadcast, Links, arrivals_s
from laminar_lab.emulation.settings import EmulationProfile, EngineTimes, LearnerTimes, emulation_of
from laminar_lab.gpus import Gpu
from laminar_lab.model_shape import BF16_BYTES, ModelShape, kv_token_bytes
from laminar_py.config import RunConfig
from laminar_py.config.learner import LearnerConfig, Recompute, ReduceDtype
from laminar_py.learner.packing import RowSize
from laminar_py.relay import CHUNK_OVERHEAD_S, choose_chunk_bytes, grow_tree

Floats = npt.NDArray[np.float64]

# Rates, fitted once to published decode tables of H100 SXM GPUs (Qwen2.5 7B, 32B and 72B on 1 to 8 GPUs, see
# `configs/emulation`), which they meet within 7 %. On another GPU only the data sheet's figures change, and nobody
# has checked that.
WEIGHTS_SHARE = 0.885  # of the memory's peak bandwidth, at which an engine reads weights
CACHE_SHARE = 0.9  # of the memory's peak bandwidth, at which an engine reads keys and values
LAYER_S = 27e-6  # launch of a layer's kernels on one GPU
JOIN_S = 10.6e-6  # more for each layer that is spread over GPUs
EXPOSED_SHARE = 0.5  # of a sequence's FLOPs in decode; reading the weights hides the rest
PREFILL_MFU = 0.7
LINK_SHARE = 2 / 3  # of NVLink's peak, in an all-reduce
# Rates measured with 1.5B parameters on an H100, or where it says so an H200, and its host (docs/performance.md)
RELAY_BYTES_PER_S = 1.2e9  # of a version, as a delta, until another process has verified it
SEALED_BYTES_PER_S = 1.7e9  # of a link with one sealed lane, one core at each end
CURVE_BYTES_PER_S = 0.53e9  # of a link without lanes
DELTA_SHARE = 0.0082  # of a version's bytes, after a step at a learning rate of 1e-6
ENCODE_BYTES_PER_S = 12.8e9  # of a version, at the root, on eight threads
PROVE_BYTES_PER_S = 2.2e9  # of a version that one thread of a node makes of deltas and proves, on our host
PUBLISH_BYTES_PER_S = 20e9  # of a version, that the learner's GPU is copied out of while the learner waits
# Effective bytes of AdamW and the norm of gradients a parameter, at the memory's peak: 16 ms for 1.5B on an H200
OPTIMIZER_BYTES = 50
LOAD_BYTES_PER_S = 4.2e9  # of a GPU's share of a version that SGLang 0.5.15 reads from a mapped file
# Medians of simulations (experiments/plan): the share of the draining loss that repacking and later responses
# recover, with 1, 2, 3, 4 and more replicas, by the shares of a step that a replica admits, and by p99 over p50 of
# the lengths
DEPTHS, TAILS = (2.0, 4.0), (4.0, 7.5)
RECOVERED = np.array(
    [
        [[0.3, 0.1, 0.3, 0.45, 0.9], [0.3, 0.2, 0.3, 0.4, 0.45]],
        [[0.3, 0.35, 0.6, 0.75, 0.95], [0.25, 0.25, 0.25, 0.25, 0.25]],
    ]
)  # [depth, tail, replicas]
# Assumptions
LEARNER_MFU = 0.4  # RL systems show 0.1 to 0.45 end to end
PUBLISH_S = 0.5  # until the hosts of a simulation have a version, where neither config nor profile says it
RESERVE_TOKENS = 600  # that an engine keeps free for the growth of a request


# ---- decode


def engine_times(shape: ModelShape, gpu: Gpu, *, tensor_parallel: int, adapters: int = 0) -> EngineTimes:
    """Compute the times of a replica on GPUs of one node from the data sheet.

    A decode step reads the weights and the KV cache, and launches each layer's kernels. Each sequence adds FLOPs
    and its share of two all-reduces a layer. Prefill takes FLOPs and the same all-reduces. A load takes all
    weights, or `adapters` of so many parameters.
    """
    weights = shape.served_bytes * shape.total / tensor_parallel
    layers, joined = shape.num_hidden_layers, tensor_parallel > 1
    flops = 2.0 * shape.active / tensor_parallel
    moved = 2.0 * (tensor_parallel - 1) / tensor_parallel * BF16_BYTES * shape.hidden_size
    reduced = 2.0 * layers * moved / (LINK_SHARE * gpu.link_bytes_per_s)
    return EngineTimes(
        step_s=weights / (WEIGHTS_SHARE * gpu.hbm_bytes_per_s) + layers * (LAYER_S + JOIN_S * joined),
        sequence_s=EXPOSED_SHARE * flops / gpu.bf16_flops + reduced,
        kv_token_s=kv_token_bytes(shape, tensor_parallel) / (CACHE_SHARE * gpu.hbm_bytes_per_s),
        prefill_tokens_per_s=1.0 / (flops / (PREFILL_MFU * gpu.bf16_flops) + reduced),
        load_s=version_bytes(adapters or shape.total) / tensor_parallel / LOAD_BYTES_PER_S,
        reserve_tokens=RESERVE_TOKENS,
    )


def decode_terms(sequences: float, kv_tokens: float) -> tuple[float, float, float]:
    """Return the factors of `step_s`, `sequence_s` and `kv_token_s` in a decode step."""
    return (1.0, sequences, kv_tokens)


def decode_step_s(times: EngineTimes, sequences: Floats | float, context: Floats | float) -> Floats | float:
    """Return the seconds of a decode step; `context` is the sequences' mean number of tokens."""
    return times.step_s + sequences * (times.sequence_s + times.kv_token_s * context)


def recovered_share(replicas: int, *, depth: float, tail: float) -> float:
    """Return the share of the draining loss that a fleet of replicas recovers.

    A replica admits `depth` times its share of a step under one version; `tail` is p99 over p50 of the lengths.
    """
    of_depths = RECOVERED[:, :, min(replicas, RECOVERED.shape[2]) - 1]
    of_tails = [float(np.interp(math.log(depth), np.log(DEPTHS), shares)) for shares in of_depths.T]
    return float(np.interp(math.log(tail), np.log(TAILS), of_tails))


# ---- learner


def learner_times(shape: ModelShape, gpu: Gpu, *, mfu: float = LEARNER_MFU, adapters: int = 0) -> LearnerTimes:
    """Compute the times of one learner GPU from the data sheet, at `mfu`.

    A parameter and token take 6 FLOPs, and 4 where the weights are frozen beneath adapters. `adapters` counts the
    parameters of these. Optimizer and publish take their times as if one GPU held everything, an upper bound for
    several ranks.
    """
    return LearnerTimes(
        train_tokens_per_s=mfu * gpu.bf16_flops / ((4.0 if adapters else 6.0) * shape.active),
        num_parameters=shape.total,
        num_active=shape.active,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_hidden_layers,
        optimizer_s=OPTIMIZER_BYTES * (adapters or shape.total) / gpu.hbm_bytes_per_s,
        publish_s=version_bytes(adapters or shape.total) / PUBLISH_BYTES_PER_S,
        adapters=adapters,
    )


def with_passes(
    times: LearnerTimes, *, updates: int = 1, reference: bool = False, proximal: bool = False, critic: bool = False
) -> LearnerTimes:
    """Return the times of a learner whose step has several `updates` and more forward passes.

    `reference`: the reference model's pass over all tokens. `proximal`: a pass over the tokens of every update but
    the first, for their probabilities at the step's start. A pass takes 2 FLOPs a parameter and token. `critic`:
    a pass for values, and a second model's training with its updates.
    """
    own = 4.0 if times.adapters else 6.0
    more = 2.0 * reference + 2.0 * proximal * (updates - 1) / updates + (2.0 + own) * critic
    changes = {
        "train_tokens_per_s": times.train_tokens_per_s * own / (own + more),
        "optimizer_s": times.optimizer_s * updates * (1 + critic),
    }
    return times.model_copy(update=changes)


def token_cost(times: LearnerTimes, size: RowSize) -> float:
    """Return the mean cost of a token in rows of this size, over a token of a short sequence."""
    return 1.0 + times.attention_share * size.squares / size.tokens


def learner_step_s(
    times: LearnerTimes,
    *,
    tokens: float,
    cost: float,
    microbatches: float,
    ranks: int,
    traffic: "RankTraffic | None" = None,
) -> float:
    """Return the seconds of a step with equal microbatches, and of its publish. Each microbatch runs on one rank,
    and the ranks take them in rounds. A round takes as long as its `traffic`, if this is longer than the
    computation that hides it.

    `LearnerTimes.step_s` computes the same for microbatches that are known one by one, without traffic.
    """
    rounds = math.ceil(microbatches / ranks)
    fixed_s = times.optimizer_s + times.publish_s
    round_s = tokens / microbatches * cost / times.train_tokens_per_s
    if traffic is None:
        return fixed_s + rounds * round_s
    round_s += traffic.exchange_s
    last_s = max(round_s, traffic.round_s + traffic.copies_s)
    return fixed_s + (rounds - 1) * max(round_s, traffic.round_s) + last_s


@dataclass(frozen=True, slots=True)
class RankTraffic:
    """Seconds of the learner's collectives, e.g. `RankTraffic(round_s=0.18, copies_s=0.3)`."""

    round_s: float  # of a microbatch: two gathers of bf16 weights, and a sum of gradients over the shards
    copies_s: float  # of an update: a sum of gradients over the copies
    exchange_s: float = 0.0  # of a microbatch that ranks share: around attention, which nothing hides


def rank_traffic(
    shape: ModelShape,
    gpu: Gpu,
    learner: LearnerConfig,
    *,
    tokens: float,
    per_node: int,
    network_bytes_per_s: float,
    link_bytes_per_s: float | None = None,
) -> RankTraffic:
    """Return the traffic of ranks on nodes of `per_node` GPUs, which share a node's network.

    A ring over ranks of one node runs at NVLink's speed, or at the measured `link_bytes_per_s`. A ring over nodes
    runs at most at the network's. Ranks of one node share a microbatch, with `tokens` of it each.
    """
    size, copies = learner.shard_size, learner.world_size // learner.shard_size
    trained = shape.total if learner.lora is None else shape.adapters(learner.lora)
    summed = (2 if learner.reduce_dtype is ReduceDtype.BFLOAT16 else 4) * trained  # bytes
    link = link_bytes_per_s or LINK_SHARE * gpu.link_bytes_per_s
    of_shards = link if size <= per_node else min(link, network_bytes_per_s)
    of_copies = link if learner.world_size <= per_node else min(link, network_bytes_per_s / min(size, per_node))
    round_bytes = (2 * BF16_BYTES * shape.total + summed) * (size - 1) / size
    passes = 2 if learner.recompute is Recompute.NONE else 3
    exchanged = 2 * BF16_BYTES * (shape.query_width + shape.key_width) * shape.num_hidden_layers * passes * tokens
    return RankTraffic(
        round_s=round_bytes / of_shards,
        copies_s=2 * summed / size * (copies - 1) / copies / of_copies,
        exchange_s=exchanged * (1 - 1 / learner.context_parallel) / link,
    )


# ---- publication


def version_bytes(num_parameters: int) -> int:
    """Return the bytes of a version in bf16."""
    return BF16_BYTES * num_parameters


def arrival_s(num_bytes: int, *, nodes: int, network_bytes_per_s: float, relay_bytes_per_s: float | None) -> float:
    """Return the seconds until every node has a version, through a pipeline of chunks, however many nodes there
    are. Without a measured rate of the relay, `RELAY_BYTES_PER_S` counts.
    """
    relay = RELAY_BYTES_PER_S if relay_bytes_per_s is None else relay_bytes_per_s
    return num_bytes / min(network_bytes_per_s, relay) if nodes > 1 else 0.0


def simulated_publish_s(config: RunConfig, profile: EmulationProfile) -> float:
    """Return the seconds of a simulated run from a step until hosts have its version, before any relay tree."""
    emulation = emulation_of(config)
    simulation, rate = emulation.simulation, profile.relay_bytes_per_s
    if simulation.publish_s is not None:
        return simulation.publish_s
    if rate is None or simulation.link_gbit_per_s is not None:
        return PUBLISH_S
    return version_bytes(profile.learner.num_published) / rate / emulation.compression


def host_arrivals_s(config: RunConfig, *, num_parameters: int) -> list[float]:
    """Return the emulated seconds from the learner's host to each replica host [H], by the relay's cost model.

    All are 0 if the config has no `rollout.engine.simulation.link_gbit_per_s`.
    """
    simulation, relay = emulation_of(config).simulation, config.relay
    num_hosts = -(-config.rollout.replicas // simulation.replicas_per_host)
    if simulation.link_gbit_per_s is None:
        return [0.0] * num_hosts
    tree = grow_tree(1 + num_hosts, fanout=relay.fanout)  # the learner's host is the root
    num_bytes, speed = version_bytes(num_parameters), simulation.link_gbit_per_s * 1e9 / 8
    chunk_bytes = choose_chunk_bytes(tree, num_bytes, bytes_per_s=speed, overhead_s=CHUNK_OVERHEAD_S)
    return arrivals_s(tree, Broadcast(num_bytes), Links(speed, CHUNK_OVERHEAD_S), chunk_bytes=chunk_bytes)[1:]


# ---- measured coefficients


@dataclass(frozen=True, slots=True)
class TimedShape:
    """A measured time and its formula's terms, e.g. `TimedShape("64 x 400 tokens", (1, 64, 25600), 0.021)`."""

    name: str
    terms: tuple[float, ...]  # [K] factor of each coefficient
    seconds: float


@dataclass(frozen=True, slots=True)
class LinearFit:
    """Observations [N] and fitted coefficients [K], e.g. `LinearFit(observations, (0.006, 8e-6, 2e-8))`."""

    observations: Sequence[TimedShape]
    coefficients: tuple[float, ...]

    def seconds(self, terms: Sequence[float]) -> float:
        """Return the fitted time of these terms [K]."""
        return sum(factor * term for factor, term in zip(self.coefficients, terms, strict=True))

    @property
    def errors(self) -> list[float]:
        """Fitted over measured time less 1, for each observation [N]."""
        return [self.seconds(one.terms) / one.seconds - 1 for one in self.observations]

    @property
    def mean_error(self) -> float:
        """Mean absolute error."""
        return float(np.mean(np.abs(self.errors)))

    @property
    def worst_error(self) -> float:
        """Largest absolute error."""
        return max(map(abs, self.errors))


def fit(observations: Sequence[TimedShape]) -> LinearFit:
    """Fit coefficients that are not negative, with the least sum of squared relative errors.

    Relative errors make a short time count as much as a long time. The function tries every subset of the terms,
    since there are few; a term outside the best subset has the coefficient 0.
    """
    terms = np.array([np.array(one.terms) / one.seconds for one in observations])  # [N, K]
    scale = np.abs(terms).max(0)
    best, least = np.zeros(len(scale)), float(len(observations))
    for size in range(1, len(scale) + 1):
        for chosen in map(list, combinations(range(len(scale)), size)):
            found = np.linalg.lstsq(terms[:, chosen] / scale[chosen], np.ones(len(terms)), rcond=None)[0]
            if (found < 0).any():
                continue
            lost = float(np.square(terms[:, chosen] / scale[chosen] @ found - 1).sum())
            if lost < least:
                least, best = lost, np.zeros(len(scale))
                best[chosen] = found / scale[chosen]
    return LinearFit(tuple(observations), tuple(best.tolist()))
