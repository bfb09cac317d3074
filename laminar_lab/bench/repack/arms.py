"""Arms of repacking, which `fleet` (simulated) and `schedules` (real runtime) compare.

An arm is a planner, or replicas that never drain: they swap weights in place, and so are the ceiling.
"""

from pathlib import Path

from laminar_py.config.rollout import DEFAULT_PLANNER, NO_PLANNER

CONFIG = Path("configs/emulation/repack.yaml")
PAPER, FULL = "paper", "full"
ARMS = (NO_PLANNER, PAPER, DEFAULT_PLANNER, FULL)


def arm_settings(arm: str) -> list[str]:
    """Return the settings of planner and refresh of an arm."""
    planner, refresh = (NO_PLANNER, "in_place") if arm == FULL else (arm, "drain")
    return [f"repack.planner={planner}", f"rollout.on_new_weights={refresh}"]
