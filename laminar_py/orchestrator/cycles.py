"""Collection of cycles at times of our own. Called by the controller.

By itself Python looks at everything that lives each time that this has grown by a quarter: with 10,000 live
trajectories the event loop stands still for 0.1 s every few seconds, and next to nothing is found, since what the
controller has is freed as it goes.
"""

import asyncio
import gc

EVERY_S = 60.0
NEVER = 1_000_000_000  # collections of what is younger, after which Python would look at all


async def collect_cycles() -> None:
    """Look at all objects once a minute, and at none that are there at the start, until cancelled."""
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    while True:
        await asyncio.sleep(EVERY_S)
        gc.collect()
