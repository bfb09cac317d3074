"""The term `math`: it compares the final answer of a response with the answer of its problem.

`verify` has the verifier. It runs in a process of its own, so a hanging verification costs its own response alone.
"""

from functools import lru_cache

from laminar_py.config import Count, RewardKind, Seconds, TermConfig
from laminar_py.records import FinishReason, Prompt, Reward, ScoringRequest

PROCESSES = 4
MEMORY_BYTES = 2 << 30
CACHED = 1 << 16  # answers of problems that were looked at


class MathTerm(TermConfig):
    """1 for a response whose final answer equals the problem's, else 0: numbers, formulas, sets, intervals,
    tuples, matrices, units, several answers. The term reads the last explicit mark after the thinking (`####`,
    `Answer:`, `<answer>`, a closed `\\boxed{...}`), or the phrase naming it. If the problem's answer is
    a decimal of four significant digits or more, any number that rounds to it is right."""

    kind: str = "math"
    verdict: bool | str = True
    timeout_s: Seconds | None = 3.0
    """Longest time of a verification, which takes milliseconds; null: `reward.timeout_s`."""
    most_processes: Count = PROCESSES
    """Most processes of each scorer. A scorer adds a process when a response waits for a slow verification."""
    approximate: bool = False
    """Also accept a decimal of four significant digits or more that rounds the right number: 0.3333 for 1/3."""
    cut: bool = False
    """Also verify responses that a token limit cut."""

    @property
    def processes(self) -> int:
        """Number of processes at most."""
        return self.most_processes

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that suffice for any readable answer."""
        return MEMORY_BYTES


class MathReward:
    """Verifies final answers; records the reason of each verdict, e.g. `wrong: 3/4 (values)`."""

    def __init__(self, term: MathTerm) -> None:
        from laminar_contrib.mathematics.verify import MathOutcome, canonical, verify

        self._cut = term.cut
        self._approximate = term.approximate
        self._canonical = canonical
        self._verify = verify
        self._right = MathOutcome.RIGHT

    def __call__(self, request: ScoringRequest) -> Reward:
        """Return 1.0 for a right final answer, else 0.0."""
        if request.finish_reason is not FinishReason.STOP and not self._cut:
            return Reward(0.0, text="cut by a cap")
        verdict = self._verify(request.text_after_reasoning, request.answer, approximate=self._approximate)
        text = f"{verdict.outcome.value}: {verdict.answer} ({verdict.reason})"
        answer = self._canonical(verdict.answer) if request.set_name else ""  # training has no use for votes
        return Reward(float(verdict.outcome is self._right), text=text, answer=answer)


def fault_in_answer(term: MathTerm, problem: Prompt) -> str | None:
    """Return why no answer can be compared with a problem's answer; None for a good one."""
    if not problem.answer:
        return "`answer` is missing or empty"
    return _complaint(problem.answer)


@lru_cache(maxsize=CACHED)
def _complaint(answer: str) -> str | None:
    from laminar_contrib.mathematics.verify import check_reference

    return check_reference(answer)


MATH = RewardKind(settings=MathTerm, make=MathReward, caches=True, fault=fault_in_answer)
