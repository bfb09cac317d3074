"""Rewards of a run computed again from its record: requests as scorers had them, and what they gave then.

Called by `laminar rescore`, which has the requests scored. Reads the ledger and its archive only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from laminar_py.audit.stored import stored_responses
from laminar_py.config.reward import RewardConfig
from laminar_py.ledger.database import LedgerError, reading
from laminar_py.records.scoring import Score, ScoringRequest
from laminar_py.records.trajectory import DropReason

NOT_SCORED = (DropReason.REWARD_FAILED, DropReason.REWARD_TIMEOUT)


@dataclass(frozen=True, slots=True)
class RecordedScore:
    """A response and its reward in the ledger; None where it could not be scored."""

    request: ScoringRequest
    reward: float | None

    def difference(self, score: Score, reward: RewardConfig) -> str | None:
        """Line on a reward that is another today, e.g. `g3.1: 1 on record, 0 now`; None where they agree.

        Where there was none there may be one today: a server was away, or a call was too slow.
        """
        if self.reward is None:
            return None
        rounding = max(term.rounding for term in reward.of_task(self.request.task)) * max(1.0, abs(self.reward))
        if score.value is not None and abs(self.reward - score.value) <= rounding:
            return None
        now = f"no value ({score.detail})" if score.value is None else f"{score.value:g}"
        return f"{score.trajectory_id}: {self.reward:g} on record, {now} now"


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
