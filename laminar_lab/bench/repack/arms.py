"""Compared arms of repacking, and their rows. Called by `fleet` (simulated) and `workload` (real runtime).

An arm is a planner, or replicas that never drain: they swap weights in place, and so are the ceiling.
"""

from collections.abc import Mapping, Sequence
from statistics import median

from laminar_lab.bench.report import Ratio, Row
from laminar_py.config.rollout import DEFAULT_PLANNER, NO_PLANNER

PAPER, FULL = "paper", "full"
ARMS = (NO_PLANNER, PAPER, DEFAULT_PLANNER, FULL)


def arm_settings(arm: str) -> list[str]:
    """Return the settings of planner and refresh of an arm."""
    planner, refresh = (NO_PLANNER, "in_place") if arm == FULL else (arm, "drain")
    return [f"repack.planner={planner}", f"rollout.on_new_weights={refresh}"]


def compare_arms(
    rates: Mapping[str, Sequence[float]],
    latencies: Mapping[str, Sequence[float]],
    *,
    suffix: str = "",
    conditions: str,
) -> list[Row]:
    """Make the rows of all arms from generated tokens a second and p95 latencies [seeds] of each arm."""
    off = f"without repacking {median(rates[NO_PLANNER]):,.0f} generated tokens/s"

    def over(name: str, values: Mapping[str, Sequence[float]], one: str, other: str) -> Row:
        ratio = Ratio.between(values[one], values[other])
        unit = f"x ({ratio.least:.3f} to {ratio.most:.3f})"
        return Row(f"{name}{suffix}", ratio.median, unit, f"{conditions}; {off}")

    gains = [
        (ours - off) / (full - off)
        for ours, off, full in zip(rates[DEFAULT_PLANNER], rates[NO_PLANNER], rates[FULL], strict=True)
    ]
    share = f"of the ceiling's gain ({min(gains):.3f} to {max(gains):.3f})"
    return [
        over("throughput_repack_over_off", rates, DEFAULT_PLANNER, NO_PLANNER),
        over("throughput_paper_over_off", rates, PAPER, NO_PLANNER),
        over("throughput_full_over_off", rates, FULL, NO_PLANNER),
        Row(f"gain_of_ceiling{suffix}", median(gains), share, f"{conditions}; {off}"),
        over("ours_over_paper_planner", rates, DEFAULT_PLANNER, PAPER),
        over("latency_p95_over_off", latencies, DEFAULT_PLANNER, NO_PLANNER),
    ]
