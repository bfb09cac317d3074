"""Rewards of a run computed again from its record: requests as scorers had them, and what they gave then.

Called by `laminar rescore`, which has the requests scored. Reads the ledger and its archive only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from laminar_py.audit.stored import stored_responses
from laminar_py.ledger.database import LedgerError, reading
from laminar_py.records.scoring import Score, ScoringRequest
from laminar_py.records.trajectory import DropReason

NOT_SCORED = (DropReason.REWARD_FAILED, DropReason.REWARD_TIMEOUT)
NEAR = 1e-6  # of its size, by which two rewards may differ


@dataclass(frozen=True, slots=True)
class RecordedScore:
    """A response and its reward in the ledger; None where it could not be scored."""

    request: ScoringRequest
    reward: float | None

    def difference(self, score: Score) -> str | None:
        """Line on a reward that is another today, e.g. `g3.1: 1 on record, 0 now`; None where they agree."""
        if self.reward is None or score.value is None:
            same = self.reward is None and score.value is None
        else:
            same = abs(self.reward - score.value) <= NEAR * max(1.0, abs(self.reward))
        if same:
            return None
        before = "no value" if self.reward is None else f"{self.reward:g}"
        now = f"no value ({score.detail})" if score.value is None else f"{score.value:g}"
        return f"{score.trajectory_id}: {before} on record, {now} now"


def recorded_scores(run: Path) -> Iterator[RecordedScore]:
    """Responses of a run that were scored, or could not be. Raises `LedgerError` where a prompt is lost."""
    with reading(run) as connection:
        for row, prompt, payload in stored_responses(run, connection):
            if row.finish_reason is None or (row.reward is None and row.drop_reason not in NOT_SCORED):
                continue
            if prompt is None:
                raise LedgerError(f"trajectory={row.id}: its prompt {row.prompt_id} is not stored")
            request = ScoringRequest(
                trajectory_id=row.id,
                prompt=prompt.text,
                response="",
                answer=prompt.answer,
                task=prompt.task,
                finish_reason=row.finish_reason,
                prompt_ids=prompt.ids,
                response_ids=payload.ids,
                logprobs=payload.logprobs,
                fields_json=prompt.fields_json,
            )
            yield RecordedScore(request, row.reward)
