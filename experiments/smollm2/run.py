"""A run of smollm2: `python experiments/smollm2/run.py [--json] [--seeds N]`, an hour a seed on two cores.

Held-out accuracy (300 questions, greedy, at most 64 tokens, so that prose is read too) before and after RL, with
the gain's 95 % interval over families of facts, shares of answers that cannot be read, and
`experiments/smollm2/out/curves.png`. The hour lasts from the start of the command to the end of the last
evaluation; a longer run has no figure. A second start measures only the missing seeds.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np

from laminar_lab.bench.report import Row
from laminar_lab.bench.runs import drawing, measure_seeds, train
from laminar_py.ledger.database import reading
from laminar_py.ledger.rows import decode_event
from laminar_py.records.events import Scored

HERE = Path(__file__).parent
CONFIG = HERE / "smollm2.yaml"
LIMIT_S = 3_600.0  # of a whole run
RESAMPLES = 2_000
NOT_READ = ("unparsable", "cut")  # beginnings of the reward's text for an answer


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """An answer to a held-out question, e.g. of the family `8+9`, right, `right: 9 (tokens)`."""

    family: str
    reward: float
    said: str


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Answers to the held-out questions after `rl_s` seconds of RL."""

    rl_s: float
    answers: list[Answer]

    @property
    def right(self) -> float:
        """Share that is right."""
        return fmean(one.reward for one in self.answers)

    @property
    def unreadable(self) -> float:
        """Share that a cap cut, or in which no answer was found."""
        return fmean(one.said.startswith(NOT_READ) for one in self.answers)


class LearnedArithmetic(msgspec.Struct, frozen=True, kw_only=True):
    """A run's curve, and its time from the first moment to the last."""

    folder: str
    wall_s: float
    curve: list[CurvePoint]

    @property
    def gain(self) -> float:
        """Accuracy at the end above that at the start."""
        return self.curve[-1].right - self.curve[0].right

    @property
    def families(self) -> int:
        """Families of facts that were asked for."""
        return len({one.family for one in self.curve[0].answers})

    @property
    def least_gain(self) -> float:
        """Lower end of the gain's 95 % interval over families, each of which is resampled as a whole."""
        found = defaultdict[str, list[float]](lambda: [0.0, 0.0, 0.0])  # questions, right at the start, at the end
        for place, point in enumerate((self.curve[0], self.curve[-1])):
            for one in point.answers:
                found[one.family][1 + place] += one.reward
                found[one.family][0] += 1 - place
        asked, before, after = np.array(list(found.values())).T
        drawn = np.random.default_rng(0).integers(len(asked), size=(RESAMPLES, len(asked)))
        gains = (after - before)[drawn].sum(1) / asked[drawn].sum(1)
        return float(np.percentile(gains, 2.5))


def learn(seed: int) -> LearnedArithmetic:
    """Make one run."""
    began = time.monotonic()
    done = train(CONFIG, ["name=smollm2", f"seed={seed}"], limit_s=LIMIT_S)
    wall_s = time.monotonic() - began
    curve = [
        CurvePoint(rl_s=one.rl_s, answers=answers(done.folder, one.version)) for one in done.summary.evaluations
    ]
    return LearnedArithmetic(folder=str(done.folder), wall_s=wall_s, curve=curve)


def answers(run: Path, version: int) -> list[Answer]:
    """Read the held-out answers of a version, with the verdicts of the reward."""
    with reading(run) as connection:
        rows = connection.execute(
            "SELECT fields, reward, body FROM trajectory JOIN prompt ON prompt.id = prompt_id"
            " JOIN event ON subject = trajectory.id WHERE event.kind = 'scored' AND trajectory.kind = 'eval'"
            " AND newest_version = ?",
            (version,),
        ).fetchall()
    found = [(fields, reward, decode_event(body)) for fields, reward, body in rows]
    return [
        Answer(family=msgspec.json.decode(fields)["family"], reward=reward, said=event.terms[0].text)
        for fields, reward, event in found
        if isinstance(event, Scored)
    ]


def rows(runs: Sequence[LearnedArithmetic]) -> list[Row]:
    """Make the rows of the worst of the seeds: least gain, lowest end, most unreadable answers, longest time."""
    asked = f"300 held-out questions of {runs[0].families} families of facts"
    setting = f"smollm2, {len(runs)} seed(s), {asked}, greedy; " + ", ".join(
        f"{one.curve[0].right:.3f} -> {one.curve[-1].right:.3f} in {one.wall_s:.0f} s" for one in runs
    )
    start, end = [one.curve[0] for one in runs], [one.curve[-1] for one in runs]
    return [
        Row("smollm2_accuracy_start", max(moment.right for moment in start), "share of 300", setting),
        Row("smollm2_accuracy_end", min(moment.right for moment in end), "share of 300", setting),
        Row("smollm2_accuracy_gain", min(one.gain for one in runs), "share of 300", setting),
        Row(
            "smollm2_accuracy_gain_least",
            min(one.least_gain for one in runs),
            "share of 300",
            "lower end of the 95 % interval",
        ),
        Row("smollm2_unreadable_start", max(moment.unreadable for moment in start), "share of 300", setting),
        Row("smollm2_unreadable_end", max(moment.unreadable for moment in end), "share of 300", setting),
        Row("smollm2_seconds", max(one.wall_s for one in runs), "s", setting),
    ]


def draw(runs: Sequence[LearnedArithmetic], path: Path) -> None:
    """Draw two lines for each seed: right, and unreadable."""
    with drawing(path) as axes:
        for seed, one in enumerate(runs):
            minutes = [moment.rl_s / 60 for moment in one.curve]
            axes.plot(
                minutes, [moment.right for moment in one.curve], color=f"C{seed}", label=f"right, seed {seed}"
            )
            axes.plot(
                minutes, [moment.unreadable for moment in one.curve], "--", color=f"C{seed}", label="unreadable"
            )
        axes.set(xlabel="minutes of RL", ylabel="share of held-out questions", ylim=(0, 1))
        axes.legend()


if __name__ == "__main__":
    measure_seeds(__doc__, HERE, learn=learn, kind=LearnedArithmetic, rows=rows, draw=draw, seeds=1)
