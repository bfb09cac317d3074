"""Three runs of tiny_agent: `python experiments/tiny_agent/run.py [--json] [--seeds N]`, minutes a seed.

Mean reward of 192 games before and after RL. A second start measures only the missing seeds.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from laminar_lab.bench.report import Row
from laminar_lab.bench.runs import measure_seeds, train

HERE = Path(__file__).parent
LIMIT_S = 900.0  # of a run that should take 300


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """A run: mean reward by seconds of RL."""

    folder: str
    wall_s: float
    rewards: list[tuple[float, float]]


def learn(seed: int) -> Played:
    """Make one run, with its warm start."""
    began = time.monotonic()
    done = train(HERE / "tiny_agent.yaml", ["name=tiny_agent", f"seed={seed}"], limit_s=LIMIT_S)
    return Played(folder=str(done.folder), wall_s=time.monotonic() - began, rewards=done.curve)


def rows(runs: Sequence[Played]) -> list[Row]:
    """Make the rows of the worst of the seeds: highest start, lowest end; and the time of all."""
    setting = f"tiny_agent, {len(runs)} seeds, 192 games drawn as in training; " + ", ".join(
        f"{one.rewards[0][1]:.3f} -> {one.rewards[-1][1]:.3f} in {one.wall_s:.0f} s" for one in runs
    )
    return [
        Row("agent_reward_start", max(one.rewards[0][1] for one in runs), "of the best possible", setting),
        Row("agent_reward_end", min(one.rewards[-1][1] for one in runs), "of the best possible", setting),
        Row("agent_minutes", sum(one.wall_s for one in runs) / 60, "min", "all seeds, one after another"),
    ]


if __name__ == "__main__":
    measure_seeds(__doc__, HERE, learn=learn, kind=Played, rows=rows)
