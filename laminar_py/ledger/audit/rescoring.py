"""Rewards of a run computed again from its record: requests as scorers had them, and what they gave then.

Called by `laminar rescore`, which has the requests scored. Reads the ledger and its archive only.
"""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from laminar_py.config.reward import RewardConfig, TermConfig
from laminar_py.ledger.database import LedgerError, reading
from laminar_py.ledger.responses import StoredResponses
from laminar_py.ledger.rows import TrajectoryRow, decode_event
from laminar_py.ledger.segments.payload import Payload
from laminar_py.records.evaluations import set_of
from laminar_py.records.events import Scored
from laminar_py.records.scoring import Score, ScoringRequest
from laminar_py.records.trajectory import DropReason, Prompt

_BLOCK = 1024
NOT_SCORED = (DropReason.REWARD_FAILED, DropReason.REWARD_TIMEOUT)


@dataclass(frozen=True, slots=True)
class RecordedScore:
    """A response and its reward in the ledger, None where it could not be scored, with terms as far as known."""

    request: ScoringRequest
    reward: float | None
    terms: Mapping[str, float] = field(default_factory=dict)  # values by name

    def difference(self, score: Score, reward: RewardConfig) -> str | None:
        """Line on a reward that is another today, e.g. `g3.1: 1 on record, 0 now`; None where they agree.

        Terms are compared one by one, each with its own rounding, where the same ones are on record.
        Where there was no reward there may be one today: a server was away, or a call was too slow.
        """
        if self.reward is None:
            return None
        if score.value is None:
            return f"{score.trajectory_id}: {self.reward:g} on record, no value ({score.detail}) now"
        roundings = _Roundings(reward.of_task(self.request.task, set_name=self.request.set_name))
        now = {term.name: term.value for term in score.terms}
        same_terms = now.keys() == self.terms.keys()
        for name in now if same_terms else ():
            if abs(now[name] - self.terms[name]) > roundings.of(name) * max(1.0, abs(self.terms[name])):
                told = f"{name} {self.terms[name]:g} on record, {now[name]:g} now"
                return f"{score.trajectory_id}: {told} (reward {self.reward:g}, {score.value:g})"
        is_known = same_terms and len(now) > 0
        allowed = roundings.of_sum(now) if is_known else roundings.largest * max(1.0, abs(self.reward))
        if abs(self.reward - score.value) <= allowed:
            return None
        return f"{score.trajectory_id}: {self.reward:g} on record, {score.value:g} now"


@dataclass(frozen=True, slots=True)
class _Roundings:
    """Roundings of a task's terms, of which a function may give several values under names of its own."""

    config: Sequence[TermConfig]

    @property
    def largest(self) -> float:
        return max(term.rounding for term in self.config)

    def of(self, name: str) -> float:
        return self._term(name).rounding

    def of_sum(self, values: Mapping[str, float]) -> float:
        """Difference of the sum where each value has its own, times the term's weight."""
        each = ((self._term(name), abs(value)) for name, value in values.items())
        return sum(abs(term.weight) * term.rounding * max(1.0, value) for term, value in each)

    def _term(self, name: str) -> TermConfig:
        own = (term for term in self.config if name == term.title or name.startswith(f"{term.title}."))
        return next(own, None) or max(self.config, key=lambda term: term.gives_columns)


def recorded_scores(run: Path) -> Iterator[RecordedScore]:
    """Responses of a run that were scored, or could not be. Raises `LedgerError` where a prompt is lost."""
    with reading(run) as connection:
        stored = StoredResponses(run, connection).all_responses()
        while block := list(islice(stored, _BLOCK)):
            terms = _recorded_terms(connection, [row for row, _, _ in block])
            for row, prompt, payload in block:
                if row.finish_reason is None or (row.reward is None and row.drop_reason not in NOT_SCORED):
                    continue
                if len(payload.ids) < row.length:
                    continue  # lost with a host
                if prompt is None:
                    raise LedgerError(f"trajectory={row.id}: its prompt {row.prompt_id} is not stored")
                yield RecordedScore(_request(row, prompt, payload), row.reward, terms.get(row.id, {}))


def _request(row: TrajectoryRow, prompt: Prompt, payload: Payload) -> ScoringRequest:
    assert row.finish_reason is not None, "only finished responses are scored"
    return ScoringRequest(
        trajectory_id=row.id,
        prompt=prompt.text,
        response="",
        answer=prompt.answer,
        task=prompt.task,
        set_name=set_of(row.group_id),
        finish_reason=row.finish_reason,
        prompt_ids=prompt.ids,
        response_ids=payload.ids,
        logprobs=payload.logprobs,
        fields_json=prompt.fields_json,
    )


def _recorded_terms(connection: sqlite3.Connection, rows: list[TrajectoryRow]) -> dict[str, dict[str, float]]:
    """Values of the terms on record, by trajectory: events have no index, so those of a block are read at once."""
    wanted = {row.id for row in rows}
    found = connection.execute(
        "SELECT subject, body FROM event WHERE seq BETWEEN ? AND ? AND kind = ? ORDER BY seq",
        (min(row.first_seq for row in rows), max(row.last_seq for row in rows), "scored"),
    )
    events = ((subject, decode_event(body)) for subject, body in found if subject in wanted)
    return {
        subject: {term.name: term.value for term in event.terms}
        for subject, event in events
        if isinstance(event, Scored)
    }
