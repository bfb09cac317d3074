"""Evaluations in the ledger: their figures, and the answers from which the figures follow.

The summary, the report and the audit read them, and a controller that resumes open passes.
"""

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from laminar_py.ledger.database import reading
from laminar_py.ledger.rows import TrajectoryRow, decode_event, trajectory_rows
from laminar_py.records.evaluations import EvalAnswer, TermFigures, pass_number, problem_of, set_of
from laminar_py.records.events import Evaluated, Scored
from laminar_py.records.trajectory import DropReason, FinishReason, Status

GIVEN_UP = (DropReason.RUN_ENDED, DropReason.VERSION_LOST)
UNSCORED = (DropReason.REWARD_FAILED, DropReason.REWARD_TIMEOUT, DropReason.REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPass:
    """A pass without a result when its controller ended, e.g. `e4-aime` under version 7, with 128 answers."""

    id: str
    version: int | None  # of its tokens; None: the pass has no tokens yet
    step: int | None  # the learner step of its version
    answers: Mapping[str, EvalAnswer]


def open_passes(run: Path) -> list[OpenPass]:
    """Return the passes that a resumed run continues, oldest first; call it after the rollback is on record.

    It leaves out passes that an earlier resume gave up, that have two versions, or whose version is undone.
    Raises `ConfigError`.
    """
    with reading(run) as connection:
        rows = connection.execute(
            "SELECT group_id, min(oldest_version) FROM trajectory"
            " WHERE kind = 'eval' AND group_id NOT IN (SELECT pass_id FROM evaluation)"
            " GROUP BY group_id HAVING count(*) FILTER (WHERE drop_reason IN (?, ?)) = 0"
            " AND min(oldest_version) IS max(newest_version)",
            GIVEN_UP,
        )
        found = [(id, version) for id, version in rows.fetchall() if set_of(id)]
        steps = dict(connection.execute("SELECT version, step FROM version WHERE NOT undone"))
        return [
            OpenPass(id=id, version=version, step=steps.get(version), answers=read_answers(connection, id))
            for id, version in sorted(found, key=lambda row: pass_number(row[0]))
            if version is None or version in steps
        ]


def read_evaluations(run: Path) -> list[Evaluated]:
    """Return every evaluation of a run, sorted by `in_order`. Raises `ConfigError`."""
    with reading(run) as connection:
        return evaluations_on_record(connection)


def evaluations_on_record(connection: sqlite3.Connection) -> list[Evaluated]:
    """Return the evaluations of a ledger, except of undone versions, sorted by `in_order`."""
    rows = connection.execute(
        "SELECT body FROM evaluation CROSS JOIN event USING (seq) LEFT JOIN version USING (version)"
        " WHERE NOT coalesce(undone, 0) ORDER BY evaluation.seq"
    )
    events = [decode_event(body) for (body,) in rows]
    return in_order(event for event in events if isinstance(event, Evaluated))


def in_order(evaluations: Iterable[Evaluated]) -> list[Evaluated]:
    """Sort evaluations by seconds of RL, then by start, and make their figures `comparable`."""
    return comparable(sorted(evaluations, key=lambda passed: (passed.rl_s, pass_number(passed.pass_id))))


def comparable(evaluations: Iterable[Evaluated]) -> list[Evaluated]:
    """Return evaluations in which each set has accuracies in all of its passes, or mean rewards in all.

    A reward with a bonus may be 0 or 1 throughout one pass by chance; its figure must keep one name over the run.
    The same holds for each term.
    """
    known = list(evaluations)
    graded = {evaluation.set_name for evaluation in known if not evaluation.figures.is_accuracy}
    graded_terms = {
        (evaluation.set_name, name)
        for evaluation in known
        for name, term in evaluation.figures.terms.items()
        if not term.pass_at
    }
    for place, evaluation in enumerate(known):
        figures, set_name = evaluation.figures, evaluation.set_name
        terms = {
            name: TermFigures(term.mean) if (set_name, name) in graded_terms else term
            for name, term in figures.terms.items()
        }
        figures = msgspec.structs.replace(figures, terms=terms)
        if set_name in graded:
            figures = msgspec.structs.replace(figures, is_accuracy=False, pass_at={})
        known[place] = msgspec.structs.replace(evaluation, figures=figures)
    return known


def of_first_set(evaluations: Iterable[Evaluated], names: Iterable[str]) -> list[Evaluated]:
    """Return the evaluations of one set: the first of the config's set `names` with an evaluation.

    The first pass on record may be of another set after a crash, so it cannot decide.
    """
    ordered = in_order(evaluations)
    known = {evaluation.set_name for evaluation in ordered}
    first = next((name for name in names if name in known), None)
    return [evaluation for evaluation in ordered if evaluation.set_name == first]


def read_answers(connection: sqlite3.Connection, group_id: str) -> dict[str, EvalAnswer]:
    """Return the answers of a pass by trajectory, both scored and failed ones."""
    rows = [
        row
        for row in trajectory_rows(connection, "kind = 'eval' AND group_id = ?", (group_id,))
        if row.status is Status.CONSUMED or row.drop_reason in UNSCORED
    ]
    scores = _scores(connection, rows)
    return {row.id: answer_of(row, scores.get(row.id) if row.status is Status.CONSUMED else None) for row in rows}


def answer_of(row: TrajectoryRow, scored: Scored | None) -> EvalAnswer:
    """Return the record of an ended trajectory in a pass; `scored` is None if scoring failed."""
    return EvalAnswer(
        problem=problem_of(row.id),
        sample=row.sample_index,
        reward=None if scored is None else scored.reward,
        terms={} if scored is None else scored.term_values,
        answer="" if scored is None else scored.answer,
        length=row.length,
        truncated=row.finish_reason is FinishReason.LENGTH,
    )


def _scores(connection: sqlite3.Connection, rows: list[TrajectoryRow]) -> dict[str, Scored]:
    """Return scores by trajectory, by one scan of the events from the first to the last of `rows`."""
    if not rows:
        return {}
    bodies = connection.execute(
        "SELECT body FROM event WHERE seq BETWEEN ? AND ? AND kind = 'scored'",
        (min(row.first_seq for row in rows), max(row.last_seq for row in rows)),
    )
    wanted = {row.id for row in rows}
    events = (decode_event(body) for (body,) in bodies)
    return {
        event.trajectory_id: event
        for event in events
        if isinstance(event, Scored) and event.trajectory_id in wanted
    }
