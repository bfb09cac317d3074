"""Three runs of tool_calculator: `python experiments/tool_calculator/run.py [--json] [--seeds N]`, minutes a seed.

Held-out accuracy (greedy) before and after RL, the share of training responses that ask the calculator, and
`experiments/tool_calculator/out/curves.png`. Started again, it goes on with the seeds that are missing.
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean

import msgspec

from laminar_lab.bench.report import Row, show
from laminar_lab.bench.runs import KeptResults, train
from laminar_py.ledger.database import reading
from laminar_py.records.spans import decode_spans, num_turns

HERE = Path(__file__).parent
CONFIG = HERE / "tool_calculator.yaml"
KEPT = Path(".cache/tool_calculator")
SEEDS = 3
LIMIT_S = 900.0  # of a run that should take 200


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A run: held-out accuracy by seconds of RL, and the share of responses with a call by step."""

    folder: str
    wall_s: float
    accuracy: list[tuple[float, float]]
    calls: list[float]


def learn(seed: int) -> Asked:
    """One run, with its warm start."""
    began = time.monotonic()
    done = train(CONFIG, ["name=tool_calculator", f"seed={seed}"], limit_s=LIMIT_S)
    wall_s = time.monotonic() - began
    accuracy = [(evaluation.rl_s, evaluation.mean) for evaluation in done.summary.evaluations]
    return Asked(folder=str(done.folder), wall_s=wall_s, accuracy=accuracy, calls=calls(done.folder))


def calls(run: Path) -> list[float]:
    """Share of the responses that each step trained on in which the model asked: they have several turns."""
    with reading(run) as connection:
        found = connection.execute("SELECT step, spans FROM trajectory WHERE kind = 'train' AND step IS NOT NULL")
        by_step: dict[int, list[bool]] = {}
        for step, spans in found:
            by_step.setdefault(step, []).append(num_turns(decode_spans(spans)) > 1)
    return [mean(by_step[step]) for step in sorted(by_step)]


def rows(runs: Sequence[Asked]) -> list[Row]:
    """The worst of the seeds: highest start, lowest end, longest time."""
    setting = f"tool_calculator, {len(runs)} seeds, 244 held-out problems, greedy; " + ", ".join(
        f"{one.accuracy[0][1]:.3f} -> {one.accuracy[-1][1]:.3f} in {one.wall_s:.0f} s" for one in runs
    )
    return [
        Row("tool_accuracy_start", max(one.accuracy[0][1] for one in runs), "share of 244", setting),
        Row("tool_accuracy_end", min(one.accuracy[-1][1] for one in runs), "share of 244", setting),
        Row("tool_calls_start", max(one.calls[0] for one in runs), "of training responses", "in the first step"),
        Row("tool_calls_end", min(one.calls[-1] for one in runs), "of training responses", "in the last step"),
        Row("tool_seconds", max(one.wall_s for one in runs), "s", setting),
    ]


def draw(runs: Sequence[Asked], path: Path) -> None:
    """Accuracy over minutes of RL, and calls over steps."""
    import matplotlib.pyplot as plt  # half a second that only a drawing needs

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
    for seed, one in enumerate(runs):
        left.plot([s / 60 for s, _ in one.accuracy], [share for _, share in one.accuracy], label=f"seed {seed}")
        right.plot(one.calls, label=f"seed {seed}")
    left.set(xlabel="minutes of RL", ylabel="held-out accuracy", ylim=(0, 1.02))
    right.set(xlabel="step", ylabel="responses that ask", ylim=(0, 1.02))
    left.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    """Run what is missing, draw and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs, with seeds 0, 1, ...")
    args = parser.parse_args()
    kept = KeptResults(KEPT, sources=[HERE, CONFIG], settings="accuracy and calls")
    runs = [kept.get(f"seed-{seed}", Asked, partial(learn, seed)) for seed in range(args.seeds)]
    draw(runs, HERE / "out" / "curves.png")
    show("tool_calculator", rows(runs), as_json=args.json)


if __name__ == "__main__":
    main()
