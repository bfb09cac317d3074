"""Held-out accuracy after equal time at different bounds on staleness, with and without corrections for it.

`python experiments/staleness/run.py [--json] [--seeds N] [--seconds S]` trains the quickstart once for each bound,
algorithm and seed, and draws `experiments/staleness/out/accuracy.png`.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import mean

from laminar_lab.bench.report import Row, show
from laminar_lab.bench.runs import FinishedRun, train

CONFIG = Path("configs/quickstart.yaml")
OUT = Path(__file__).parent / "out"
BOUNDS = (0, 1, 2, 4, 8)
DECOUPLED = ["algorithm.name=decoupled_ppo", "algorithm.clip_high=0.28", "algorithm.updates_per_step=2"]
ALGORITHMS: dict[str, list[str]] = {
    "grpo": [],  # ratios against the policy that drew the token
    "decoupled": [*DECOUPLED, "algorithm.correction=none"],
    "decoupled_tis": DECOUPLED,
}
Found = Mapping[tuple[str, int], list[FinishedRun]]


def run(algorithm: str, bound: int, *, seed: int, seconds: int) -> FinishedRun:
    """One run, with enough trajectories in flight to be as old as the bound allows."""
    return train(
        CONFIG,
        [
            "name=staleness",
            f"seed={seed}",
            "steps=100000",
            f"max_rl_seconds={seconds}",
            "eval.every_steps=null",
            f"staleness.max_staleness={bound}",
            "staleness.policies=[wait,drop]",  # nothing older is trained on
            "rollout.batch_per_replica=1024",  # enough in flight to be as old as any of the bounds
            "buffer.capacity=4096",
            "packer.max_tokens=2048",  # several microbatches, so that a step can have several updates
            *ALGORITHMS[algorithm],
        ],
    )


def rows(found: Found, *, seeds: int, seconds: int) -> list[Row]:
    """Accuracy at the end, and what the staleness really was."""
    setting = (
        f"quickstart, {seconds} s of RL each on the same two cores, up to 1,024 trajectories in flight at each"
        f" of two replicas, older ones dropped; mean of {seeds} seeds"
    )
    out = []
    for (algorithm, bound), runs in found.items():
        name = f"{algorithm}_{bound}"
        out += [
            Row(f"accuracy_{name}", mean(_accuracy(one) for one in runs), "share of 300", setting),
            Row(f"staleness_mean_{name}", mean(one.summary.staleness.mean for one in runs), "versions", setting),
            Row(f"steps_{name}", mean(one.summary.steps for one in runs), "steps", setting),
        ]
    return out


def _accuracy(done: FinishedRun) -> float:
    return done.summary.evaluations[-1].mean


def draw(found: Found, *, seconds: int, path: Path) -> None:
    """A line for each algorithm."""
    import matplotlib.pyplot as plt  # half a second that only a drawing needs

    figure, axes = plt.subplots(figsize=(6, 4))
    for algorithm in ALGORITHMS:
        values = [mean(_accuracy(one) for one in found[algorithm, bound]) for bound in BOUNDS]
        axes.plot(range(len(BOUNDS)), values, marker="o", label=algorithm)
    axes.set_xticks(range(len(BOUNDS)), [str(bound) for bound in BOUNDS])
    axes.set(xlabel="bound on staleness, versions", ylabel=f"held-out accuracy after {seconds} s")
    axes.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    """Run all and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=30)
    args = parser.parse_args()
    found = {
        (algorithm, bound): [run(algorithm, bound, seed=s, seconds=args.seconds) for s in range(args.seeds)]
        for algorithm in ALGORITHMS
        for bound in BOUNDS
    }
    draw(found, seconds=args.seconds, path=OUT / "accuracy.png")
    show("staleness", rows(found, seeds=args.seeds, seconds=args.seconds), as_json=args.json)


if __name__ == "__main__":
    main()
