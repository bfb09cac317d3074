"""Start and recovery of a run: the first events of a controller, and the state from which a new one continues.

Recovery only reads the ledger; the caller appends the events that it returns. A partial response continues behind
its last stored token.
"""

import math
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, groupby
from pathlib import Path

from laminar_py.config.rollout import OnNewWeights
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.ledger.database import SCHEMA_VERSION, LedgerError, reading
from laminar_py.ledger.machine import undo
from laminar_py.ledger.pieces import PieceRow, columns_of, piece_rows, spans_of, tokens_of
from laminar_py.ledger.rows import decode_event, read_prompt
from laminar_py.ledger.trajectory import LiveTrajectory, live_rows
from laminar_py.records.ages import WeightAges
from laminar_py.records.events import (
    AnyEvent,
    Checkpointed,
    FrozenLoaded,
    Interrupted,
    Ready,
    RolledBack,
    RunStarted,
    Scaled,
    Scored,
    Undone,
    Unquantized,
)
from laminar_py.records.scoring import GroupRewards
from laminar_py.records.spans import decode_spans, replace_spans
from laminar_py.records.trajectory import DropReason, Kind, Prompt, Status
from laminar_py.records.weights import Published

_UNDONE = "status = 'consumed' AND kind = 'train' AND step > ?"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedGroup:
    """A group that a step consumed, and the steps that replayed it, e.g. group "g3" of step 9, replayed by 12."""

    id: str
    step: int
    members: tuple[LiveTrajectory, ...]  # its consumed ones, in order of issue
    replays: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The state with which a new controller starts.

    The caller appends `events`, which undo consumptions after the checkpoint. `live` is the state after them:
    undone trajectories are READY. RUNNING trajectories stopped with their controller, and the caller interrupts
    them.
    """

    incarnation: int  # number of the controller that starts now
    checkpoint: Checkpointed | None  # None: the run starts from its initial weights
    events: tuple[AnyEvent, ...]
    live: tuple[LiveTrajectory, ...]  # in order of issue
    next_prompt: int  # its place in the stream
    next_evaluation: int  # number of evaluations begun
    next_sample: dict[str, int]  # by group of `live`: 1 + the highest issued sample index
    ages: WeightAges  # of all versions on record, after `events`
    refilled: tuple[float, ...] = ()  # one reward of each group without signal dropped since the last step
    rewards: tuple[float, float] = (math.inf, -math.inf)  # the worst and the best training reward
    eval_sampling: dict[str, str] = field(default_factory=dict)  # of the last start, by evaluation set
    consumed: tuple[ConsumedGroup, ...] = ()  # the last groups that may be replayed, in order of consumption
    frozen: tuple[FrozenLoaded, ...] = ()  # frozen models that ran beside the learner, in order
    unquantized: bool = False  # engines went back to weights as published
    overrides: tuple[str, ...] = ()  # settings that earlier resumes changed


def recover(run: Path, *, exists: Callable[[Checkpointed], bool] = lambda _: True, kept: int = 0) -> Recovered:
    """Read the state of a run that ended or was killed, at its newest checkpoint for which `exists` is true.

    `kept` says how many of the last consumed groups may be replayed.

    Raises `ConfigError` if the ledger cannot be read, or if every recorded checkpoint is gone.
    """
    with reading(run) as connection:
        checkpoint = newest_existing(checkpoints_on_record(connection), exists)
        step = checkpoint.step if checkpoint else 0
        events = tuple(rollback_events(connection, step, "controller_crashed"))
        live = tuple(_live(connection, step))
        (incarnation, next_prompt, next_evaluation) = connection.execute(
            "SELECT (SELECT coalesce(max(incarnation), 0) + 1 FROM incarnation),"
            " (SELECT coalesce(max(prompt_index), -1) + 1 FROM trajectory WHERE kind = 'train'),"
            " (SELECT count(DISTINCT group_id) FROM trajectory WHERE kind = 'eval')"
        ).fetchone()
        ages, told = _replay(connection, events)
        return Recovered(
            incarnation=incarnation,
            checkpoint=checkpoint,
            events=events,
            live=live,
            next_prompt=next_prompt,
            next_evaluation=next_evaluation,
            next_sample=_next_samples(connection, {trajectory.group_id for trajectory in live}),
            ages=ages,
            refilled=_rewards_without_signal(connection),
            rewards=_reward_range(connection),
            eval_sampling=started.eval_sampling if (started := last_start(connection)) else {},
            consumed=tuple(_consumed(connection, step, kept)) if kept else (),
            frozen=tuple(event for event in told if isinstance(event, FrozenLoaded)),
            unquantized=any(isinstance(event, Unquantized) for event in told),
            overrides=tuple(one for start in _starts(connection) for one in start.overrides),
        )


def first_events(
    config: RunConfig,
    *,
    incarnation: int,
    host: str,
    data: dict[str, str],
    resumed_step: int | None = None,
    simulated: bool = False,
    overrides: tuple[str, ...] = (),
    command_s: float | None = None,
) -> list[AnyEvent]:
    """Return the events of a controller's start and of its fleet.

    `data` has a digest for each data source, `overrides` the settings that a resume changed, and `command_s` the
    seconds since the command.
    """
    started = RunStarted(
        incarnation=incarnation,
        host=host,
        pid=os.getpid(),
        schema=SCHEMA_VERSION,
        config_digest=blake2b(config.model_dump_json().encode(), digest_size=16).hexdigest(),
        drain=config.rollout.on_new_weights is OnNewWeights.DRAIN,
        max_staleness=config.staleness.enforced,
        replay_max_age=config.buffer.replay.max_age if config.buffer.replay.share else None,
        resumed_step=resumed_step,
        data=data,
        eval_sampling=config.eval.sampling_by_set(config.rollout.sampling.params()),
        simulated=simulated,
        overrides=overrides,
        command_s=command_s,
    )
    return [started, Scaled(tuple(range(config.rollout.replicas)), config.rollout.engine.servers)]


def is_simulated(connection: sqlite3.Connection) -> bool:
    """Return whether a record is of a simulation, which generates no tokens."""
    started = last_start(connection)
    return started is not None and started.simulated


def known_prompts(run: Path, *, most: int) -> list[Prompt]:
    """Return about `most` recorded prompts, spread evenly by id, and one prompt of each task.

    Each has the place in the stream for which it was first issued. Raises `ConfigError`.
    """
    with reading(run) as connection:
        ids = [id for (id,) in connection.execute("SELECT id FROM prompt ORDER BY id")]
        chosen = set(ids[:: max(-(-len(ids) // most), 1)])
        by_task = connection.execute("SELECT min(id) FROM prompt GROUP BY task LIMIT ?", (most,))
        chosen.update(id for (id,) in by_task)
        return [prompt for id in sorted(chosen) if (prompt := read_prompt(connection, id)) is not None]


def is_finished(run: Path) -> bool:
    """Return whether the last controller finished the run. Raises `ConfigError` without a ledger."""
    with reading(run) as connection:
        last = connection.execute("SELECT ended FROM incarnation ORDER BY incarnation DESC LIMIT 1").fetchone()
    return last is not None and last[0] == "finished"


def closed_groups(run: Path) -> Iterator[GroupRewards]:
    """Iterate over the rewards of every closed training group, in order of their prompts."""
    with reading(run) as connection:
        rows = connection.execute(
            "SELECT prompt_index, prompt_id, reward FROM trajectory WHERE kind = ? AND reward IS NOT NULL"
            " AND (ready_s IS NOT NULL OR drop_reason = ?) ORDER BY prompt_index",
            (Kind.TRAIN, DropReason.NO_SIGNAL),
        )
        for (place, prompt_id), members in groupby(rows, key=lambda row: (row[0], row[1])):
            yield GroupRewards(place, prompt_id, tuple(reward for _, _, reward in members))


def issued_groups(run: Path) -> Iterator[tuple[str, int, str]]:
    """Iterate over the training groups on record in order of issue: id, place in the stream, and prompt."""
    with reading(run) as connection:
        yield from connection.execute(
            "SELECT group_id, prompt_index, prompt_id FROM trajectory WHERE kind = ? AND sample_index = 0"
            " ORDER BY number",
            (Kind.TRAIN,),
        )


def last_start(connection: sqlite3.Connection) -> RunStarted | None:
    """Return the event of a run's last start, None without one."""
    return next(_starts(connection), None)


def _starts(connection: sqlite3.Connection) -> Iterator[RunStarted]:
    """Yield the events of a run's starts, the last first."""
    query = "SELECT body FROM incarnation CROSS JOIN event USING (seq) ORDER BY incarnation DESC"
    for (body,) in connection.execute(query):
        event = decode_event(body)
        assert isinstance(event, RunStarted), f"{body} is no start"
        yield event


def _rewards_without_signal(connection: sqlite3.Connection) -> tuple[float, ...]:
    """Return a reward of each group dropped without signal since the last step or the last stop of a refill."""
    (stepped,) = connection.execute("SELECT coalesce(max(seq), 0) FROM step").fetchone()
    rows = connection.execute(
        "SELECT reward, min(last_seq) FROM trajectory WHERE drop_reason = ? AND last_seq > coalesce("
        "(SELECT max(seq) FROM event WHERE seq > ? AND kind = 'refillstopped'), ?)"
        " GROUP BY group_id ORDER BY min(last_seq)",
        (DropReason.NO_SIGNAL, stepped, stepped),
    )
    return tuple(reward for reward, _ in rows)


def _reward_range(connection: sqlite3.Connection) -> tuple[float, float]:
    """Return the worst and the best training reward; (inf, -inf) without any."""
    query = "SELECT min(reward), max(reward) FROM trajectory WHERE kind = 'train'"
    worst, best = connection.execute(query).fetchone()
    return (math.inf, -math.inf) if worst is None else (worst, best)


def _replay(
    connection: sqlite3.Connection, events: Iterable[AnyEvent]
) -> tuple[WeightAges, list[FrozenLoaded | Unquantized]]:
    """Return the ages of all versions on record, after the further `events`, and the events about models.

    One scan of the log.
    """
    ages, told = WeightAges(), list[FrozenLoaded | Unquantized]()
    rows = connection.execute(
        "SELECT body FROM event WHERE kind IN"
        " ('stepped', 'versionpublished', 'rolledback', 'frozenloaded', 'unquantized') ORDER BY seq"
    )
    for event in chain((decode_event(body) for (body,) in rows), events):
        ages.record_event(event)
        if isinstance(event, FrozenLoaded | Unquantized):
            told.append(event)
    return ages, told


def rollback_events(connection: sqlite3.Connection, step: int, reason: str) -> list[AnyEvent]:
    """Return the events of a rollback to the checkpoint of `step` (0: the start), for one transaction.

    These are a `RolledBack` and an `Undone` for each trajectory consumed since; none if no step follows `step`.
    """
    later = connection.execute("SELECT count(*) FROM step WHERE step > ? AND NOT undone", (step,)).fetchone()[0]
    undone = connection.execute(f"SELECT id, step FROM trajectory WHERE {_UNDONE}", (step,)).fetchall()
    if not later and not undone:
        return []
    return [RolledBack(step, reason), *(Undone(id, of_step) for id, of_step in undone)]


def unpublished(connection: sqlite3.Connection) -> list[Published]:
    """Return versions on relays or replicas above the highest published version; size 0 if no relay has it."""
    rows = connection.execute(
        "SELECT json_extract(body, '$.version') AS seen, json_extract(body, '$.digest'),"
        " coalesce(max(json_extract(body, '$.num_bytes')), 0)"
        " FROM event WHERE kind IN ('relayed', 'versionloaded')"
        " AND seen > (SELECT coalesce(max(version), -1) FROM version) GROUP BY seen"
    )
    return [Published(version, digest, num_bytes, 0.0) for version, digest, num_bytes in rows]


def checkpoints_on_record(connection: sqlite3.Connection) -> list[Checkpointed]:
    """Return the checkpoints on record that were not rolled back, newest first; their folders may be gone."""
    rows = connection.execute(
        "SELECT body FROM checkpoint CROSS JOIN event USING (seq) WHERE NOT undone ORDER BY seq DESC"
    )
    events = [decode_event(body) for (body,) in rows]
    return [event for event in events if isinstance(event, Checkpointed)]


def learner_steps(connection: sqlite3.Connection, step: int) -> int:
    """Return how many of the steps up to `step` the learner made: all but those without a trajectory."""
    counted = "SELECT count(*) FROM step WHERE NOT undone AND step <= ? AND num_trajectories > 0"
    (steps,) = connection.execute(counted, (step,)).fetchone()
    return int(steps)


def newest_existing(
    recorded: Sequence[Checkpointed], exists: Callable[[Checkpointed], bool]
) -> Checkpointed | None:
    """Return the first checkpoint for which `exists` is true; None if `recorded` is empty.

    Raises `ConfigError` if `exists` is false for all.
    """
    found = next(filter(exists, recorded), None)
    if found is None and recorded:
        raise ConfigError(
            f"checkpoint={recorded[0].path}: this folder and all older checkpoints are gone; restore it in the"
            " run's folder, or start a new run"
        )
    return found


def _next_samples(connection: sqlite3.Connection, groups: set[str]) -> dict[str, int]:
    """Return 1 + the highest sample index of each of these groups."""
    rows = connection.execute("SELECT group_id, max(sample_index) + 1 FROM trajectory GROUP BY group_id")
    return {group: index for group, index in rows if group in groups}


def _live(connection: sqlite3.Connection, step: int) -> Iterator[LiveTrajectory]:
    """Yield the complete rows of trajectories that are live after a rollback to `step`. Raises `LedgerError`."""
    for row in _complete(connection, f"status NOT IN ('consumed', 'dropped') OR {_UNDONE}", (step,)):
        if row.status is Status.CONSUMED:
            undo(row)
        yield row


def _consumed(connection: sqlite3.Connection, step: int, most: int) -> Iterator[ConsumedGroup]:
    """Yield the last `most` groups that steps up to `step` consumed, in order. Raises `LedgerError`."""
    used = "kind = 'train' AND status = 'consumed' AND step <= ?"
    query = (
        f"SELECT group_id, step FROM trajectory WHERE {used} GROUP BY group_id ORDER BY min(last_seq) DESC LIMIT ?"
    )
    steps = dict(connection.execute(query, (step, most)).fetchall()[::-1])
    members: dict[str, list[LiveTrajectory]] = {group: [] for group in steps}
    last = f"{used} AND group_id IN (SELECT group_id FROM ({query}))"
    for row in _complete(connection, last, (step, step, most)):
        members[row.group_id].append(row)
    replays: dict[str, set[int]] = {group: set() for group in steps}
    rows = connection.execute(
        "SELECT group_id, replay.step FROM replay JOIN trajectory ON id = replay.trajectory"
        " WHERE NOT undone AND replay.step BETWEEN ? AND ?",
        (min(steps.values(), default=0), step),
    )
    for group, at in rows:
        if group in replays:
            replays[group].add(at)
    for group, at in steps.items():
        yield ConsumedGroup(
            id=group, step=at, members=tuple(members[group]), replays=tuple(sorted(replays[group]))
        )


def _complete(connection: sqlite3.Connection, where: str, values: tuple[object, ...]) -> Iterator[LiveTrajectory]:
    """Yield the complete rows of trajectories that meet an SQL condition, with their pieces, in order of issue.

    Raises `LedgerError` for a trajectory whose prompt is not stored.
    """
    rows = {row.id: row for row in live_rows(connection, where, values)}
    for event in _events_of(connection, where, values):
        match event:
            case Interrupted():
                rows[event.trajectory_id].used_s = event.used_s
            case Scored():
                row = rows[event.trajectory_id]
                row.answer, row.earned, row.roles = event.answer, event.earned, event.roles
                if row.kind is Kind.EVAL:
                    row.term_values = event.term_values
            case Ready():
                rows[event.trajectory_id].roles = event.roles
    pieces: dict[int, list[PieceRow]] = {}
    for piece in piece_rows(connection, where, values):
        pieces.setdefault(piece.trajectory, []).append(piece)
    for row in rows.values():
        own = pieces.get(row.number, [])
        prompt = read_prompt(connection, row.prompt_id, index=row.prompt_index)
        if prompt is None:
            raise LedgerError(f"trajectory={row.id}: its prompt {row.prompt_id} was not stored; start a new run")
        row.prompt, row.tokens, row.columns = prompt, tokens_of(own), columns_of(own)
        row.token_spans = spans_of(own)
        if row.spans is not None:
            row.token_spans = replace_spans(row.token_spans, decode_spans(row.spans))
        yield row


def _events_of(connection: sqlite3.Connection, where: str, values: tuple[object, ...]) -> Iterator[AnyEvent]:
    """Iterate over the interruptions, scores and advantages of trajectories that meet an SQL condition."""
    rows = connection.execute(
        f"WITH wanted AS MATERIALIZED (SELECT id, first_seq FROM trajectory WHERE {where})"
        " SELECT CAST(body AS BLOB) FROM event"
        " WHERE seq > (SELECT min(first_seq) FROM wanted) AND kind IN ('interrupted', 'scored', 'ready')"
        " AND subject IN (SELECT id FROM wanted) ORDER BY seq",
        values,
    )
    return (decode_event(body) for (body,) in rows)
