"""Use of engines and of cores, and what age takes from the data, from samples beside the ledger. Pure."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laminar_py.records.metrics import FleetRow, StepRow

FRESH = "0"  # bucket of tokens that the newest weights drew


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Means over samples, e.g. `Use(slots=0.31, kv=0.12, cpu=0.97, own_cpu=0.95, cores=2)`."""

    slots: float  # share of what the engines decode at a time
    kv: float  # share of their KV caches
    cpu: float  # share of the cores that the controller may use
    own_cpu: float  # of that the run's own processes
    cores: int  # number of these; 0: not on record


@dataclass(frozen=True, slots=True, kw_only=True)
class Age:
    """Costs of old data, e.g. `Age(lost=0.38, kl={"0": 1e-4, "3-4": 0.03})`.

    `lost` is the share of the weight that is gone beside fresh data: effective sample size of the importance
    weights over trained tokens, over the same of tokens at staleness 0.
    """

    lost: float
    kl: dict[str, float]  # nats, behaviour to new policy, by staleness


def measure_use(fleet: Sequence[FleetRow], *, max_batch: int) -> Use | None:
    """Means of these samples; None without any."""
    if not fleet:
        return None
    slots = [min(running / max_batch, 1.0) for row in fleet for running in row.running]
    kv = [use for row in fleet for use in row.kv_use]
    known = [row.cpu_use for row in fleet if row.cpu_use is not None and row.cores]
    own = [row.own_cpu_use for row in fleet if row.own_cpu_use is not None and row.cores]
    return Use(
        slots=float(np.mean(slots)) if slots else 0.0,
        kv=float(np.mean(kv)) if kv else 0.0,
        cpu=float(np.mean(known)) if known else 0.0,
        own_cpu=float(np.mean(own)) if own else 0.0,
        cores=max(row.cores for row in fleet) if own else 0,
    )


def measure_age(steps: Sequence[StepRow]) -> Age:
    """Costs over these steps; what is not finite is left out."""
    shares = defaultdict[str, list[tuple[float, int]]](list)
    divergences = defaultdict[str, list[tuple[float, int]]](list)
    for row in steps:
        for bucket, tokens in row.by_staleness.items():
            shares[bucket].append((tokens.effective_share, tokens.num_tokens))
            divergences[bucket].append((tokens.kl_behaviour_k3, tokens.num_tokens))
    effective = _mean([(row.effective_share, 1) for row in steps], default=1.0)
    fresh = _mean(shares[FRESH], default=1.0)
    lost = max(0.0, 1.0 - effective / fresh) if fresh else 0.0
    return Age(lost=lost, kl={bucket: _mean(found, default=0.0) for bucket, found in sorted(divergences.items())})


def _mean(weighted: Sequence[tuple[float, int]], *, default: float) -> float:
    """Mean of the finite values, each with its weight."""
    known = [(value, weight) for value, weight in weighted if math.isfinite(value) and weight]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else default
