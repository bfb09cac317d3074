"""Draws docs/curve.png from a run of the quickstart: `python docs/draw_curve.py runs/quickstart-1`."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from laminar_lab.curves import read_curves
from laminar_py.ledger import read_rows
from laminar_py.records.metrics import StepRow

PAGE = Path(__file__).parent / "curve.png"


def draw(run: Path) -> None:
    """Draw held-out accuracy with its intervals, and the training reward, over learner steps."""
    rows = {
        row.step: row.reward for row in read_rows(run / "metrics.jsonl", StepRow)
    }  # the later row of a step counts
    points = read_curves(run)["heldout"]
    steps, values = [point.step for point in points], [point.value for point in points]
    below = [point.value - point.figures.mean.low for point in points]
    above = [point.figures.mean.high - point.value for point in points]
    figure, axes = plt.subplots(figsize=(6.4, 4.0), dpi=120)
    axes.plot(rows.keys(), rows.values(), color="#9aa3ab", linewidth=1, label="reward in training")
    axes.errorbar(
        steps, values, yerr=[below, above], color="#0072b2", marker="o", capsize=3, label="held-out accuracy"
    )
    axes.set(xlabel="learner step", ylim=(0, 1.02), title=f"quickstart: {values[0]:.2f} to {values[-1]:.2f}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(PAGE)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
