"""Three runs of tiny_agent: `python experiments/tiny_agent/run.py [--json] [--seeds N]`, minutes a seed.

Mean reward of 192 games before and after RL. Started again, it goes on with the seeds that are missing.
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from laminar_lab.bench.report import Row, show
from laminar_lab.bench.runs import KeptResults, train

HERE = Path(__file__).parent
CONFIG = HERE / "tiny_agent.yaml"
KEPT = Path(".cache/tiny_agent")
SEEDS = 3
LIMIT_S = 900.0  # of a run that should take 300


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """A run: mean reward by seconds of RL."""

    folder: str
    wall_s: float
    rewards: list[tuple[float, float]]


def learn(seed: int) -> Played:
    """One run, with its warm start."""
    began = time.monotonic()
    done = train(CONFIG, ["name=tiny_agent", f"seed={seed}"], limit_s=LIMIT_S)
    rewards = [(evaluation.rl_s, evaluation.mean) for evaluation in done.summary.evaluations]
    return Played(folder=str(done.folder), wall_s=time.monotonic() - began, rewards=rewards)


def rows(runs: Sequence[Played]) -> list[Row]:
    """The worst of the seeds: highest start, lowest end; and the time of all."""
    setting = f"tiny_agent, {len(runs)} seeds, 192 games drawn as in training; " + ", ".join(
        f"{one.rewards[0][1]:.3f} -> {one.rewards[-1][1]:.3f} in {one.wall_s:.0f} s" for one in runs
    )
    return [
        Row("agent_reward_start", max(one.rewards[0][1] for one in runs), "of the best possible", setting),
        Row("agent_reward_end", min(one.rewards[-1][1] for one in runs), "of the best possible", setting),
        Row("agent_minutes", sum(one.wall_s for one in runs) / 60, "min", "all seeds, one after another"),
    ]


def main() -> None:
    """Run what is missing, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs, with seeds 0, 1, ...")
    args = parser.parse_args()
    kept = KeptResults(KEPT, sources=[HERE, CONFIG], settings="mean rewards")
    runs = [kept.get(f"seed-{seed}", Played, partial(learn, seed)) for seed in range(args.seeds)]
    show("tiny_agent", rows(runs), as_json=args.json)


if __name__ == "__main__":
    main()
