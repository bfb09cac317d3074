"""The row of `laminar doctor` about the sandbox, by the entry point group `laminar_py.findings`."""

import asyncio

from laminar_contrib.sandbox.pool import REMEDY, SandboxPool
from laminar_py.config import ConfigError
from laminar_py.records.host import Finding


def find_sandbox() -> Finding:
    """Find whether programs of a model get fences on this machine, and why they get none."""

    async def open_pool() -> str:
        async with SandboxPool(slots=1) as pool:
            return pool.tier.value

    try:
        return Finding("sandbox", asyncio.run(open_pool()), True)
    except ConfigError as error:
        return Finding("sandbox", f"none ({error.__cause__})", False, REMEDY)
