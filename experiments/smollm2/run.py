"""A run of smollm2: `python experiments/smollm2/run.py [--json] [--seeds N]`, an hour a seed on two cores.

Held-out accuracy (300 questions, greedy, at most 64 tokens, so that prose is read too) before and after RL,
shares of answers that cannot be read, and `experiments/smollm2/out/curves.png`. The hour is that of the whole
command, from its start to the end of the last evaluation; a run that takes longer has no figure. Started again, it
goes on with the seeds that are missing.
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import msgspec

from laminar_py.bench.kept import KeptResults
from laminar_py.bench.report import Row, show
from laminar_py.bench.runs import train
from laminar_py.ledger.database import reading
from laminar_py.ledger.rows import decode_event
from laminar_py.records.events import Scored
from laminar_py.telemetry.summary import EvaluationFigures

HERE = Path(__file__).parent
CONFIG = HERE / "smollm2.yaml"
KEPT = Path(".cache/smollm2")
LIMIT_S = 3_600.0  # of a whole run
NOT_READ = ("unparsable", "cut")  # beginnings of what the reward says of an answer


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the held-out questions after `rl_s` seconds of RL."""

    rl_s: float
    right: float
    unreadable: float


class LearnedArithmetic(msgspec.Struct, frozen=True, kw_only=True):
    """A run's curve, and its time from the first moment to the last."""

    folder: str
    wall_s: float
    curve: list[CurvePoint]

    @property
    def gain(self) -> float:
        """Accuracy at the end above that at the start."""
        return self.curve[-1].right - self.curve[0].right


def learn(seed: int) -> LearnedArithmetic:
    """One run."""
    began = time.monotonic()
    done = train(CONFIG, ["name=smollm2", f"seed={seed}"], limit_s=LIMIT_S)
    wall_s = time.monotonic() - began
    curve = [point(done.folder, evaluation) for evaluation in done.summary.evaluations]
    return LearnedArithmetic(folder=str(done.folder), wall_s=wall_s, curve=curve)


def point(run: Path, evaluation: EvaluationFigures) -> CurvePoint:
    """What an evaluation found."""
    return CurvePoint(
        rl_s=evaluation.rl_s, right=evaluation.mean, unreadable=unreadable(verdicts(run, evaluation.version))
    )


def verdicts(run: Path, version: int) -> list[str]:
    """What the reward said of each held-out answer of a version, e.g. `right: 9 (tokens)`."""
    with reading(run) as connection:
        rows = connection.execute(
            "SELECT body FROM event JOIN trajectory ON id = subject"
            " WHERE event.kind = 'scored' AND trajectory.kind = 'eval' AND newest_version = ?",
            (version,),
        ).fetchall()
    events = [decode_event(body) for (body,) in rows]
    return [event.terms[0].text for event in events if isinstance(event, Scored)]


def unreadable(said: Sequence[str]) -> float:
    """Share of answers that a cap cut or in which no answer was found."""
    return sum(one.startswith(NOT_READ) for one in said) / len(said)


def rows(runs: Sequence[LearnedArithmetic]) -> list[Row]:
    """The worst of the seeds: least gain, lowest end, most that is unreadable, longest time."""
    setting = f"smollm2, {len(runs)} seed(s), 300 held-out questions, greedy; " + ", ".join(
        f"{one.curve[0].right:.3f} -> {one.curve[-1].right:.3f} in {one.wall_s:.0f} s" for one in runs
    )
    start, end = [one.curve[0] for one in runs], [one.curve[-1] for one in runs]
    return [
        Row("smollm2_accuracy_start", max(moment.right for moment in start), "share of 300", setting),
        Row("smollm2_accuracy_end", min(moment.right for moment in end), "share of 300", setting),
        Row("smollm2_accuracy_gain", min(one.gain for one in runs), "share of 300", setting),
        Row("smollm2_unreadable_start", max(moment.unreadable for moment in start), "share of 300", setting),
        Row("smollm2_unreadable_end", max(moment.unreadable for moment in end), "share of 300", setting),
        Row("smollm2_seconds", max(one.wall_s for one in runs), "s", setting),
    ]


def draw(runs: Sequence[LearnedArithmetic], path: Path) -> None:
    """Two lines for each seed: right, and unreadable."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for seed, one in enumerate(runs):
        minutes = [moment.rl_s / 60 for moment in one.curve]
        axes.plot(minutes, [moment.right for moment in one.curve], color=f"C{seed}", label=f"right, seed {seed}")
        axes.plot(minutes, [moment.unreadable for moment in one.curve], "--", color=f"C{seed}", label="unreadable")
    axes.set(xlabel="minutes of RL", ylabel="share of held-out questions", ylim=(0, 1))
    axes.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    """Run what is missing, draw and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--seeds", type=int, default=1, help="runs, with seeds 0, 1, ...")
    args = parser.parse_args()
    kept = KeptResults(KEPT, sources=[HERE, CONFIG], settings="accuracy within the hour")
    runs = [kept.get(f"seed-{seed}", LearnedArithmetic, partial(learn, seed)) for seed in range(args.seeds)]
    draw(runs, HERE / "out" / "curves.png")
    show("smollm2", rows(runs), as_json=args.json)


if __name__ == "__main__":
    main()
