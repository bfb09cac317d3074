"""Pauses of the controller's event loop that Python would make, and that are kept short. Called by the controller.

Cycles are collected at times of our own: by itself Python looks at everything that lives each time that this has
grown by a quarter, so that with 10,000 live trajectories the event loop stands still for 0.1 s every few seconds,
and next to nothing is found, since what the controller has is freed as it goes. And a thread that computes, as the
ledger's does, gives the event loop its turn sooner than after the 5 ms that Python would leave it.
"""

import asyncio
import gc
import sys

EVERY_S = 60.0
TURN_S = 0.001  # of a thread, while others wait
NEVER = 1_000_000_000  # collections of what is younger, after which Python would look at all


async def keep_short() -> None:
    """Give the loop its turn soon, and collect cycles once a minute, until cancelled."""
    turn_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(TURN_S)
    gc.freeze()
    gc.set_threshold(*thresholds[:2], NEVER)
    try:
        while True:
            await asyncio.sleep(EVERY_S)
            gc.collect()
    finally:
        sys.setswitchinterval(turn_s)
        gc.set_threshold(*thresholds)
