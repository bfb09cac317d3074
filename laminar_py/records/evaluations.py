"""Answers of an evaluation, its figures, and the names of both. Records; `estimates` makes figures of answers.

An evaluation is a pass of one set under one version: `e4-aime` is the fifth pass of a run, over the set "aime",
and `e4-aime.12.3` sample 3 of problem 12.
"""

import msgspec


def pass_id(index: int, set_name: str = "") -> str:
    """Id of a pass, e.g. "e4-aime"; "e4" of one that belongs to no set."""
    return f"e{index}-{set_name}" if set_name else f"e{index}"


def set_of(group_id: str) -> str:
    """Set of a pass by its id; "" where it belongs to none."""
    return group_id.partition("-")[2]


def pass_number(group_id: str) -> int:
    """Number of a pass by its id, in the order in which a run began them."""
    return int(group_id.partition("-")[0].removeprefix("e"))


def answer_id(group_id: str, problem: int, sample: int, *, samples: int) -> str:
    """Id of an answer's trajectory, e.g. "e4-aime.12.3"; "e4-aime.12" where problems are asked once."""
    return f"{group_id}.{problem}.{sample}" if samples > 1 else f"{group_id}.{problem}"


class EvalAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to a held-out problem.

    E.g. `EvalAnswer(problem=12, sample=3, reward=1.0, said="42", length=310)`.
    """

    problem: int  # place in the set
    sample: int
    reward: float | None  # None: it could not be scored
    said: str = ""  # what it says by the verifier; "" where it says nothing, or no term tells
    length: int  # response tokens
    truncated: bool = False  # a cap cut it

    @classmethod
    def of(
        cls, trajectory_id: str, *, sample: int, reward: float | None, said: str, length: int, truncated: bool
    ) -> "EvalAnswer":
        """The answer of a trajectory, whose id has the place of the problem."""
        problem = int(trajectory_id.split(".")[1])
        return cls(problem=problem, sample=sample, reward=reward, said=said, length=length, truncated=truncated)


class Estimate(msgspec.Struct, frozen=True):
    """A mean over problems and its 95 % bootstrap interval, e.g. `Estimate(0.41, 0.36, 0.47)`."""

    value: float
    low: float
    high: float

    def tell(self) -> str:
        """Three digits of each, e.g. "0.410 (0.360 to 0.470)"."""
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


class SetFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a pass, over the answers that have a score. Each mean is over samples, then over problems."""

    problems: int
    samples: int  # of each problem
    unscored: int  # answers without a score
    is_accuracy: bool  # every reward is 0 or 1
    mean: Estimate  # avg@k: the mean reward
    pass_at: dict[int, Estimate] = {}  # share of problems solved by one of k answers at least; of 0 and 1 alone
    majority: Estimate | None = None  # maj@k: the reward of what most answers say; None where no term tells that
    truncated: Estimate  # share of the answers that a cap cut
    length_p50: int  # response tokens
    length_p95: int

    @property
    def name(self) -> str:
        """Word for the mean."""
        return "accuracy" if self.is_accuracy else "mean reward"

    @property
    def best(self) -> tuple[int, Estimate] | None:
        """pass@k at the largest k; None where there are no samples to choose from."""
        return max(self.pass_at.items()) if self.samples > 1 and self.pass_at else None

    @property
    def graded(self) -> "SetFigures":
        """Figures for a set whose other passes have rewards beside 0 and 1: a mean reward, without pass@k."""
        return msgspec.structs.replace(self, is_accuracy=False, pass_at={})

    @property
    def told(self) -> tuple[object, ...]:
        """Figures that follow from the answers alone, which intervals do not; means to nine digits."""
        means = self.mean, self.truncated, self.majority, *self.pass_at.values()
        rounded = [None if one is None else round(one.value, 9) for one in means]
        counts = self.problems, self.samples, self.unscored, self.length_p50, self.length_p95
        return *counts, self.is_accuracy, *self.pass_at, *rounded

    def tell(self) -> str:
        """Line of text, e.g. "accuracy 0.410 (0.360 to 0.470) on 30 problems x 32, pass@32 0.733, 4.1% cut"."""
        words = [f"{self.name} {self.mean.tell()} on {self.problems} problems"]
        if self.samples > 1:
            words[0] += f" x {self.samples}"
        if self.best is not None:
            words.append(f"pass@{self.best[0]} {self.best[1].value:.3f}")
        if self.majority is not None:
            words.append(f"maj@{self.samples} {self.majority.value:.3f}")
        if self.truncated.value:
            words.append(f"{self.truncated.value:.1%} cut")
        if self.unscored:
            words.append(f"{self.unscored} answers not scored")
        return ", ".join(words)
