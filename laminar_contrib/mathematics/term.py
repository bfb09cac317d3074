"""The term `math`: the final answer of a response against that of its problem.

The verifier is in `verify`; what hangs in it costs its own response, in a process of its own.
"""

from functools import lru_cache

from laminar_py.config import Count, RewardKind, Seconds, TermConfig
from laminar_py.records import FinishReason, Prompt, Reward, ScoringRequest

PROCESSES = 4
MEMORY_BYTES = 2 << 30
CACHED = 1 << 16  # answers of problems that were looked at


class MathTerm(TermConfig):
    """1 for a response whose final answer equals the problem's, else 0: numbers, formulas, sets, intervals,
    tuples, matrices, units, several answers. The last closed `\\boxed{...}` after the thinking is looked at, or
    the phrase that names the answer."""

    kind: str = "math"
    timeout_s: Seconds | None = 3.0
    """Longest time of a verification, which takes milliseconds; null: `reward.timeout_s`."""
    most_processes: Count = PROCESSES
    """Processes of each scorer at most: one more wherever a response waits for one that is slow."""
    cut: bool = False
    """Look at responses that a cap cut, too."""

    @property
    def processes(self) -> int:
        """Processes at most."""
        return self.most_processes

    @property
    def memory_bytes(self) -> int:
        """Enough for any answer that is one."""
        return MEMORY_BYTES


class MathReward:
    """Verifies with what each verdict says on record, e.g. `wrong: 3/4 (values)`."""

    def __init__(self, term: MathTerm) -> None:
        from laminar_contrib.mathematics.verify import MathOutcome, canonical, verify

        self._cut = term.cut
        self._canonical = canonical
        self._verify = verify
        self._right = MathOutcome.RIGHT

    def __call__(self, request: ScoringRequest) -> Reward:
        """1.0 or 0.0."""
        if request.finish_reason is not FinishReason.STOP and not self._cut:
            return Reward(0.0, text="cut by a cap")
        verdict = self._verify(request.response, request.answer)
        text = f"{verdict.outcome.value}: {verdict.answer} ({verdict.reason})"
        said = self._canonical(verdict.answer) if request.set_name else ""  # training has no use for votes
        return Reward(float(verdict.outcome is self._right), text=text, said=said)


def fault_in_answer(term: MathTerm, problem: Prompt) -> str | None:
    """Complaint about an answer that nothing can be compared with."""
    if not problem.answer:
        return "`answer` is missing or empty"
    return _complaint(problem.answer)


@lru_cache(maxsize=CACHED)
def _complaint(answer: str) -> str | None:
    from laminar_contrib.mathematics.verify import check_reference

    return check_reference(answer)


MATH = RewardKind(settings=MathTerm, make=MathReward, caches=True, fault=fault_in_answer)
