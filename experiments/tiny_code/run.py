"""Three runs of tiny_code: `python experiments/tiny_code/run.py [--json] [--seeds N]`, up to 20 minutes a seed.

Held-out pass@1 (greedy, all hidden tests of a problem) before and after RL, of plain problems and of compositions
apart, and `experiments/tiny_code/out/curves.png`. A second start measures only the missing seeds.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from laminar_lab.bench.report import Row
from laminar_lab.bench.runs import drawing, measure_seeds, train
from laminar_py.ledger.database import reading
from laminar_py.observe.summary import EvaluationFigures

HERE = Path(__file__).parent
CONFIG = HERE / "tiny_code.yaml"
LIMIT_S = 1_800.0  # of a run that should take 1,200
TASKS = ("plain", "composed")


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of held-out problems that are solved after `rl_s` seconds of RL."""

    rl_s: float
    plain: float
    composed: float

    @property
    def all(self) -> float:
        """Share of all: one half is plain, the other composed."""
        return (self.plain + self.composed) / 2


class LearnedCode(msgspec.Struct, frozen=True, kw_only=True):
    """A run's curve, and its time from the first moment to the last, with the warm start."""

    folder: str
    wall_s: float
    curve: list[CurvePoint]


def learn(seed: int) -> LearnedCode:
    """Make one run, with its warm start."""
    began = time.monotonic()
    done = train(CONFIG, ["name=tiny_code", f"seed={seed}"], limit_s=LIMIT_S)
    wall_s = time.monotonic() - began
    curve = [point(done.folder, evaluation) for evaluation in done.summary.evaluations]
    return LearnedCode(folder=str(done.folder), wall_s=wall_s, curve=curve)


def point(run: Path, evaluation: EvaluationFigures) -> CurvePoint:
    """Read the shares of an evaluation; a program without a verdict counts as wrong."""
    query = (
        "SELECT avg(coalesce(reward, 0) = 1) FROM trajectory JOIN prompt ON prompt.id = prompt_id"
        " WHERE kind = 'eval' AND newest_version = ? AND task = ?"
    )
    with reading(run) as connection:
        plain, composed = (connection.execute(query, (evaluation.version, task)).fetchone()[0] for task in TASKS)
    return CurvePoint(rl_s=evaluation.rl_s, plain=plain, composed=composed)


def rows(runs: Sequence[LearnedCode]) -> list[Row]:
    """Make the rows of the worst of the seeds: highest start, lowest end, longest time."""
    setting = f"tiny_code, {len(runs)} seeds, 300 held-out problems, greedy; " + ", ".join(
        f"{one.curve[0].all:.3f} -> {one.curve[-1].all:.3f} in {one.wall_s:.0f} s" for one in runs
    )
    start, end = [one.curve[0] for one in runs], [one.curve[-1] for one in runs]
    return [
        Row("code_pass1_start", max(moment.all for moment in start), "share of 300", setting),
        Row("code_pass1_end", min(moment.all for moment in end), "share of 300", setting),
        Row("code_pass1_plain_end", min(moment.plain for moment in end), "share of 150", setting),
        Row("code_pass1_composed_end", min(moment.composed for moment in end), "share of 150", setting),
        Row("code_seconds", max(one.wall_s for one in runs), "s", setting),
    ]


def draw(runs: Sequence[LearnedCode], path: Path) -> None:
    """Draw two lines for each seed."""
    with drawing(path) as axes:
        for seed, one in enumerate(runs):
            for task, style in zip(TASKS, ("-", "--"), strict=True):
                minutes = [moment.rl_s / 60 for moment in one.curve]
                solved = [getattr(moment, task) for moment in one.curve]
                axes.plot(minutes, solved, style, color=f"C{seed}", label=f"{task}, seed {seed}")
        axes.set(xlabel="minutes of RL", ylabel="held-out pass@1", ylim=(0, 1))
        axes.legend()


if __name__ == "__main__":
    measure_seeds(__doc__, HERE, learn=learn, kind=LearnedCode, rows=rows, draw=draw)
