"""Recorded scores of a run, to compute its rewards again: the request of each scorer, and its reward.

`laminar rescore` calls it and scores the requests. It reads the ledger and segments.
"""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from laminar_lab.audit.stored import StoredResponses
from laminar_py.config.reward import RewardConfig, TermConfig
from laminar_py.ledger import LedgerError, TrajectoryRow, decode_event, reading
from laminar_py.ledger.segments import Payload
from laminar_py.records.evaluations import set_of
from laminar_py.records.events import Scored
from laminar_py.records.scoring import Score, ScoringRequest
from laminar_py.records.trajectory import DropReason, Prompt

_BLOCK = 1024
NOT_SCORED = (DropReason.REWARD_FAILED, DropReason.REWARD_TIMEOUT)


@dataclass(frozen=True, slots=True)
class RecordedScore:
    """A response and its recorded reward, which is None if the scoring failed."""

    request: ScoringRequest
    reward: float | None
    terms: Mapping[str, float] = field(default_factory=dict)  # values by name, if recorded

    def difference(self, score: Score, reward: RewardConfig) -> str | None:
        """Return a line on a reward that differs today, e.g. `g3.1: 1 on record, 0 now`; None if both agree.

        If the recorded terms are the terms of today, each is compared with its own rounding. A response without a
        recorded reward may have one today, since a server was down or a call too slow.
        """
        if self.reward is None:
            return None
        if score.value is None:
            return f"{score.trajectory_id}: {self.reward:g} on record, no value ({score.detail}) now"
        roundings = _Roundings(reward.of_task(self.request.task, set_name=self.request.set_name))
        now = {term.name: term.value for term in score.terms}
        same_terms = now.keys() == self.terms.keys()
        for name in now if same_terms else ():
            if abs(now[name] - self.terms[name]) > roundings.of_value(name) * max(1.0, abs(self.terms[name])):
                difference = f"{name} {self.terms[name]:g} on record, {now[name]:g} now"
                return f"{score.trajectory_id}: {difference} (reward {self.reward:g}, {score.value:g})"
        is_known = same_terms and len(now) > 0
        allowed = roundings.of_sum(now) if is_known else roundings.largest * max(1.0, abs(self.reward))
        if abs(self.reward - score.value) <= allowed:
            return None
        return f"{score.trajectory_id}: {self.reward:g} on record, {score.value:g} now"


@dataclass(frozen=True, slots=True)
class _Roundings:
    """Roundings of a task's terms. A function may return several values, each named `<term>.<name>`."""

    config: Sequence[TermConfig]

    @property
    def largest(self) -> float:
        return max(term.rounding for term in self.config)

    def of_value(self, name: str) -> float:
        return self._term(name).rounding

    def of_sum(self, values: Mapping[str, float]) -> float:
        """Return the rounding of the weighted sum of these values."""
        each = ((self._term(name), abs(value)) for name, value in values.items())
        return sum(abs(term.weight) * term.rounding * max(1.0, value) for term, value in each)

    def _term(self, name: str) -> TermConfig:
        matching = (term for term in self.config if name == term.title or name.startswith(f"{term.title}."))
        return next(matching, None) or max(self.config, key=lambda term: term.gives_columns)


def recorded_scores(run: Path) -> Iterator[RecordedScore]:
    """Iterate over the scored responses of a run, and failed ones. Raises `LedgerError` if a prompt is lost."""
    with reading(run) as connection:
        stored = StoredResponses(run, connection).all_responses()
        while block := list(islice(stored, _BLOCK)):
            terms = _recorded_terms(connection, [row for row, _, _ in block])
            for row, prompt, payload in block:
                if row.finish_reason is None or (row.reward is None and row.drop_reason not in NOT_SCORED):
                    continue
                if len(payload.ids) < row.length:
                    continue  # its tokens are lost
                if prompt is None:
                    raise LedgerError(f"trajectory={row.id}: its prompt {row.prompt_id} is not stored")
                yield RecordedScore(_request(row, prompt, payload), row.reward, terms.get(row.id, {}))


def _request(row: TrajectoryRow, prompt: Prompt, payload: Payload) -> ScoringRequest:
    """Make the scoring request of a finished response from its stored tokens."""
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
    """Return the recorded values of terms, by trajectory of a block, in one scan, since events have no index."""
    wanted = {row.id for row in rows}
    bodies = connection.execute(
        "SELECT subject, body FROM event WHERE seq BETWEEN ? AND ? AND kind = ? ORDER BY seq",
        (min(row.first_seq for row in rows), max(row.last_seq for row in rows), "scored"),
    )
    events = ((subject, decode_event(body)) for subject, body in bodies if subject in wanted)
    return {
        subject: {term.name: term.value for term in event.terms}
        for subject, event in events
        if isinstance(event, Scored)
    }
