"""Survey of the tiers that this machine offers, for `laminar doctor`: found out by running a program in each."""

import asyncio

from laminar_py.config.section import ConfigError
from laminar_py.sandbox.pool import SandboxPool
from laminar_py.sandbox.records import SandboxTier, TierOffer


async def survey_tiers() -> list[TierOffer]:
    """Every tier, the strongest first, with why it is not offered, or how it is weaker than it could be."""
    return [await _offer(tier) for tier in SandboxTier]


def available_tiers() -> list[TierOffer]:
    """Survey for callers without an event loop."""
    return asyncio.run(survey_tiers())


async def _offer(tier: SandboxTier) -> TierOffer:
    try:
        async with SandboxPool(slots=1, require=tier, tier=tier) as pool:
            return TierOffer(tier, True, pool.weaknesses)
    except ConfigError as error:
        return TierOffer(tier, False, str(error.__cause__))  # without field and remedy
