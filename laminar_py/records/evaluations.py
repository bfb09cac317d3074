"""Evaluations: ids of passes and answers, and figures of a pass (means, intervals, pass@k, majority votes). Pure.

A pass has all answers to one set of held-out problems under one version. `e4-aime` is the fifth pass of a run,
over the set "aime", and `e4-aime.12.3` is sample 3 of problem 12 in this pass. The controller computes the figures
when a pass ends, and the audit computes them again. The figures do not depend on the order of the answers
(`tests/records/test_evaluations.py`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import comb

import msgspec
import numpy as np

from laminar_py.records.columns import Array
from laminar_py.records.host import counted
from laminar_py.records.scoring import short_terms

RESAMPLES = 1_000
SEED = 0  # of the resampling, so that every process computes the same figures
TAILS = (2.5, 97.5)  # percentiles that hold 95 % of the resampled means


def pass_id(index: int, set_name: str = "") -> str:
    """Id of pass number `index`, e.g. "e4-aime", or "e4" for a pass over an unnamed set."""
    return f"e{index}-{set_name}" if set_name else f"e{index}"


def set_of(group_id: str) -> str:
    """Name of the set in `group_id`, the id of a pass, e.g. "aime" in "e4-aime"; "" for an unnamed set."""
    return group_id.partition("-")[2]


def pass_number(group_id: str) -> int:
    """Number in `group_id`, the id of a pass, e.g. 4 in "e4-aime"; a run counts its passes from 0."""
    return int(group_id.partition("-")[0].removeprefix("e"))


def answer_id(group_id: str, problem: int, sample: int, *, samples: int) -> str:
    """Id of an answer's trajectory, e.g. "e4-aime.12.3", or "e4-aime.12" if each problem has one sample."""
    return f"{group_id}.{problem}.{sample}" if samples > 1 else f"{group_id}.{problem}"


def problem_of(trajectory_id: str) -> int:
    """Place of an answer's problem in its set, from the id of the answer's trajectory."""
    return int(trajectory_id.split(".")[1])


class EvalAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A response to a held-out problem, e.g. `EvalAnswer(problem=12, sample=3, reward=1.0, length=310)`."""

    problem: int  # place in the set
    sample: int
    reward: float | None  # None: the response could not be scored
    terms: dict[str, float] = {}  # values of the terms, before their weights
    answer: str = ""  # final answer that the verifier found, which majority votes count; "" if it found none
    length: int  # response tokens
    truncated: bool = False  # a cap ended the response


class Estimate(msgspec.Struct, frozen=True):
    """A mean over problems with its 95 % bootstrap interval, e.g. `Estimate(0.41, 0.36, 0.47)`."""

    value: float
    low: float
    high: float

    def describe(self) -> str:
        """Text with three digits, e.g. "0.410 (0.360 to 0.470)"."""
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


class TermFigures(msgspec.Struct, frozen=True):
    """Figures of one term of the reward, e.g. `TermFigures(Estimate(0.41, 0.36, 0.47))`."""

    mean: Estimate  # before the term's weight
    pass_at: dict[int, Estimate] = {}  # k -> pass@k, if the term gives verdicts, as `math` and `code`

    def describe(self) -> str:
        """Text such as "accuracy 0.410 pass@32 0.733"; the mean alone where values are no verdicts."""
        if not self.pass_at:
            return f"{self.mean.value:.3f}"
        k, share = max(self.pass_at.items())
        return f"accuracy {self.mean.value:.3f}" + (f" pass@{k} {share.value:.3f}" if k > 1 else "")


class SetFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a pass. Each mean is over a problem's samples, then over problems; rewards are of scored answers.

    E.g. `SetFigures(problems=30, samples=32, unscored=0, is_accuracy=True, mean=Estimate(0.41, 0.36, 0.47), ...)`.
    """

    problems: int
    samples: int  # of each problem
    unscored: int  # answers without a score
    verdicts: tuple[str, ...] = ()  # terms whose values are right (1) or wrong (0)
    is_accuracy: bool  # every reward is the value of one of `verdicts` alone
    mean: Estimate  # mean reward: avg@k
    terms: dict[str, TermFigures] = {}  # of the reward
    pass_at: dict[int, Estimate] = {}  # k -> pass@k, the share of problems that one of k answers solves
    majority: Estimate | None = None  # maj@k: reward of the most frequent answer; None: no answers were found
    truncated: Estimate  # share of answers that a cap ended
    length_p50: int  # response tokens
    length_p95: int  # response tokens

    @property
    def name(self) -> str:
        """Name of the figure `mean`."""
        return "accuracy" if self.is_accuracy else "mean reward"

    @property
    def best(self) -> tuple[int, Estimate] | None:
        """(largest k, pass@k); None with one sample for each problem, or if rewards are no accuracy."""
        return max(self.pass_at.items()) if self.samples > 1 and self.pass_at else None

    @property
    def shown_terms(self) -> dict[str, TermFigures]:
        """Terms with figures of their own, under short names: all if there are several, and one with a weight."""
        terms = self.terms.items()
        return short_terms({name: term for name, term in terms if len(terms) > 1 or term.mean != self.mean})

    @property
    def exact(self) -> tuple[object, ...]:
        """Figures that the audit compares: all but the bootstrap intervals, with means to nine digits."""
        of_terms = [one for term in self.terms.values() for one in (term.mean, *term.pass_at.values())]
        means = self.mean, self.truncated, self.majority, *self.pass_at.values(), *of_terms
        rounded = [None if mean is None else round(mean.value, 9) for mean in means]
        counts = self.problems, self.samples, self.unscored, self.length_p50, self.length_p95
        return *counts, self.is_accuracy, *self.pass_at, *self.terms, *rounded

    @property
    def rows(self) -> dict[str, str]:
        """Figures as texts with their intervals, by name in the order of a table."""
        rows = {"problems x samples": f"{self.problems} x {self.samples}", self.name: self.mean.describe()}
        rows |= {f"pass@{k}": share.describe() for k, share in self.pass_at.items() if k > 1}
        for name, term in self.shown_terms.items():
            rows[f"{name} accuracy" if term.pass_at else name] = term.mean.describe()
            rows |= {f"{name} pass@{k}": share.describe() for k, share in term.pass_at.items() if k > 1}
        if self.majority is not None:
            rows[f"maj@{self.samples}"] = self.majority.describe()
        rows["cut by a cap"] = self.truncated.describe()
        rows["tokens p50 / p95"] = f"{self.length_p50} / {self.length_p95}"
        rows["not scored"] = f"{self.unscored} of {self.problems * self.samples}"
        return rows

    def describe(self) -> str:
        """Text such as "accuracy 0.410 (0.360 to 0.470) on 30 problems x 32, pass@32 0.733, 4.1% cut"."""
        words = [f"{self.name} {self.mean.describe()} on {counted(self.problems, 'problem')}"]
        if self.samples > 1:
            words[0] += f" x {self.samples}"
        if self.best is not None:
            words.append(f"pass@{self.best[0]} {self.best[1].value:.3f}")
        words += [f"{name} {term.describe()}" for name, term in self.shown_terms.items()]
        if self.majority is not None:
            words.append(f"maj@{self.samples} {self.majority.value:.3f}")
        if self.truncated.value:
            words.append(f"{self.truncated.value:.1%} cut")
        if self.unscored:
            words.append(f"{counted(self.unscored, 'answer')} not scored")
        return ", ".join(words)


def set_figures(answers: Iterable[EvalAnswer], *, samples: int, verdicts: Sequence[str] = ()) -> SetFigures | None:
    """Compute figures of a pass with `samples` answers to each problem; None if no answer has a score.

    `verdicts` names the terms whose values are right (1) or wrong (0). A problem without any scored answer is left
    out of the means.
    """
    ordered = sorted(answers, key=lambda answer: (answer.problem, answer.sample))
    by_problem: dict[int, list[EvalAnswer]] = {}
    for answer in ordered:
        by_problem.setdefault(answer.problem, []).append(answer)
    kept = [group for group in by_problem.values() if any(one.reward is not None for one in group)]
    if not kept:
        return None
    scored = [[one for one in group if one.reward is not None] for group in kept]
    rewards = [[one.reward or 0.0 for one in group] for group in scored]
    is_accuracy = all(_is_verdict(one, verdicts) for group in scored for one in group)
    names = dict.fromkeys(name for group in scored for one in group for name in one.terms)
    can_vote = samples > 1 and any(one.answer for group in scored for one in group)
    lengths = [answer.length for answer in ordered]
    return SetFigures(
        problems=len(by_problem),
        samples=samples,
        unscored=sum(answer.reward is None for answer in ordered),
        verdicts=tuple(verdicts),
        is_accuracy=is_accuracy,
        mean=_estimate([sum(group) / len(group) for group in rewards]),
        terms={name: _term_figures(scored, name, samples, is_verdict=name in verdicts) for name in names},
        pass_at=_pass_at(rewards, samples) if is_accuracy else {},
        majority=_estimate([_majority_reward(group) for group in scored]) if can_vote else None,
        truncated=_estimate([sum(one.truncated for one in group) / len(group) for group in kept]),
        length_p50=int(np.percentile(lengths, 50, method="higher")),
        length_p95=int(np.percentile(lengths, 95, method="higher")),
    )


def _is_verdict(answer: EvalAnswer, verdicts: Sequence[str]) -> bool:
    """Return whether an answer's reward is the verdict of its only term."""
    verdict = [value for name, value in answer.terms.items() if name in verdicts]
    return len(answer.terms) == 1 and verdict == [answer.reward] and answer.reward in (0.0, 1.0)


def _term_figures(
    scored: Sequence[Sequence[EvalAnswer]], name: str, samples: int, *, is_verdict: bool
) -> TermFigures:
    """Return figures of a term, over problems and answers that have it: a task may have terms of its own."""
    having = [[one.terms[name] for one in group if name in one.terms] for group in scored]
    values = [group for group in having if group]
    are_verdicts = is_verdict and all(value in (0.0, 1.0) for group in values for value in group)
    return TermFigures(
        _estimate([sum(group) / len(group) for group in values]), _pass_at(values, samples) if are_verdicts else {}
    )


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of `k` answers is right, from `num_answers` >= k.

    Chen et al. 2021, "Evaluating large language models trained on code", equation 1.
    """
    return 1.0 - comb(num_answers - num_right, k) / comb(num_answers, k)


def _pass_at(rewards: Sequence[Sequence[float]], samples: int) -> dict[int, Estimate]:
    """pass@k for k = 1, 2, 4, ... and `samples`, over problems with at least k scored answers.

    `rewards` has the rewards 0 or 1 of each problem's scored answers.
    """
    counts = [(len(group), round(sum(group))) for group in rewards]
    found: dict[int, Estimate] = {}
    for k in (*(2**power for power in range((samples - 1).bit_length())), samples):
        chances = [pass_at_k(number, right, k) for number, right in counts if number >= k]
        if chances:
            found[k] = _estimate(chances)
    return found


def _majority_reward(group: Sequence[EvalAnswer]) -> float:
    """Reward of the most frequent answer to a problem, or the mean over tied answers; 0 without any answer."""
    votes = Counter(one.answer for one in group if one.answer)
    if not votes:
        return 0.0
    most = max(votes.values())
    rewards = [
        sum(one.reward or 0.0 for one in group if one.answer == answer) / count
        for answer, count in votes.items()
        if count == most
    ]
    return sum(rewards) / len(rewards)


def _estimate(numbers: Sequence[float]) -> Estimate:
    """Mean of one number per problem, with its 95 % interval by resampling problems."""
    values: Array = np.array(numbers)  # [problems]
    draws, size = np.random.default_rng(SEED), len(values)
    means = [values[draws.integers(size, size=size)].mean() for _ in range(RESAMPLES)]
    low, high = np.percentile(means, TAILS)
    return Estimate(float(values.mean()), float(low), float(high))
