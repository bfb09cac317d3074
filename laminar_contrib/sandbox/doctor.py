"""The row of `laminar doctor` about the sandbox, by the entry point group `laminar_py.findings`."""

import asyncio

from laminar_contrib.sandbox.pool import REMEDY, survey_tiers
from laminar_contrib.sandbox.records import SandboxTier
from laminar_py.records.host import Finding


def find_sandbox() -> Finding:
    """Find the strongest sandbox for programs of a model, and why no stronger one works."""
    offers = asyncio.run(survey_tiers())
    best = next(offer for offer in offers if offer.offered)
    missing = [f"{offer.tier.value}: {offer.reason}" for offer in offers[: offers.index(best)]]
    weaker = "; ".join([best.reason] * bool(best.reason) + missing)
    good = best.tier is not SandboxTier.NONE
    return Finding("sandbox", f"{best.tier.value}{f' ({weaker})' if weaker else ''}", good, "" if good else REMEDY)
