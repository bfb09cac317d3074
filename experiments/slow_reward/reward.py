"""A reward that waits, as one that asks a judge does: log-normal, p50 0.5 s and p95 5 s; its value is a coin."""

import asyncio
import hashlib
import math
from statistics import NormalDist

from laminar_py import ScoringRequest

P50_S, P95_S = 0.5, 5.0
SIGMA = math.log(P95_S / P50_S) / NormalDist().inv_cdf(0.95)


def draws(request: ScoringRequest) -> tuple[float, float]:
    """Two numbers in (0, 1) that a trajectory's name gives."""
    digest = hashlib.blake2b(request.trajectory_id.encode(), digest_size=16).digest()
    first, second = (int.from_bytes(half, "big") for half in (digest[:8], digest[8:]))
    return (first + 0.5) / 2**64, (second + 0.5) / 2**64


def free(request: ScoringRequest) -> float:
    """The coin alone."""
    return float(draws(request)[0] < 0.5)


async def slow(request: ScoringRequest) -> float:
    """The coin, after a while."""
    coin, place = draws(request)
    await asyncio.sleep(P50_S * math.exp(SIGMA * NormalDist().inv_cdf(place)))
    return float(coin < 0.5)
