"""A reward function for the kill test: short programs are better. It waits a little, so that calls are cut off."""

import asyncio

from laminar_py import ScoringRequest

PAUSE_S = 0.01


async def short(request: ScoringRequest) -> float:
    """One over the number of lines."""
    await asyncio.sleep(PAUSE_S)
    return 1 / (1 + request.response.count("\n"))
