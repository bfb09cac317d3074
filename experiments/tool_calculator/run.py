"""Three runs of tool_calculator: `python experiments/tool_calculator/run.py [--json] [--seeds N]`, minutes a seed.

Held-out accuracy (greedy) before and after RL, the share of training responses that ask the calculator, and
`experiments/tool_calculator/out/curves.png`. A second start measures only the missing seeds.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import msgspec

from laminar_lab.bench.report import Row
from laminar_lab.bench.runs import drawing, measure_seeds, train
from laminar_py.ledger.database import reading
from laminar_py.records.spans import decode_spans, num_turns

HERE = Path(__file__).parent
CONFIG = HERE / "tool_calculator.yaml"
LIMIT_S = 900.0  # of a run that should take 200


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A run: held-out accuracy by seconds of RL, and the share of responses with a call by step."""

    folder: str
    wall_s: float
    accuracy: list[tuple[float, float]]
    calls: list[float]


def learn(seed: int) -> Asked:
    """Make one run, with its warm start."""
    began = time.monotonic()
    done = train(CONFIG, ["name=tool_calculator", f"seed={seed}"], limit_s=LIMIT_S)
    wall_s = time.monotonic() - began
    return Asked(folder=str(done.folder), wall_s=wall_s, accuracy=done.curve, calls=calls(done.folder))


def calls(run: Path) -> list[float]:
    """Return the share of each step's training responses with several turns: in these the model asked."""
    with reading(run) as connection:
        found = connection.execute("SELECT step, spans FROM trajectory WHERE kind = 'train' AND step IS NOT NULL")
        by_step: dict[int, list[bool]] = {}
        for step, spans in found:
            by_step.setdefault(step, []).append(num_turns(decode_spans(spans)) > 1)
    return [mean(by_step[step]) for step in sorted(by_step)]


def rows(runs: Sequence[Asked]) -> list[Row]:
    """Make the rows of the worst of the seeds: highest start, lowest end, longest time."""
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
    """Draw accuracy over minutes of RL, and calls over steps."""
    with drawing(path, columns=2, size=(9, 3.5)) as (left, right):
        for seed, one in enumerate(runs):
            left.plot(
                [s / 60 for s, _ in one.accuracy], [share for _, share in one.accuracy], label=f"seed {seed}"
            )
            right.plot(one.calls, label=f"seed {seed}")
        left.set(xlabel="minutes of RL", ylabel="held-out accuracy", ylim=(0, 1.02))
        right.set(xlabel="step", ylabel="responses that ask", ylim=(0, 1.02))
        left.legend()


if __name__ == "__main__":
    measure_seeds(__doc__, HERE, learn=learn, kind=Asked, rows=rows, draw=draw)
