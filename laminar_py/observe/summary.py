"""`summary.json`: figures of a run, from the ledger and the controller's counters."""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from statistics import median
from typing import TypeVar

import msgspec

from laminar_py.ledger.database import reading
from laminar_py.ledger.evaluations import evaluations_on_record, of_first_set
from laminar_py.ledger.recovery import is_simulated
from laminar_py.ledger.rows import decode_event, read_accounting, read_turns
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.observe.stats import Stats, quantile, turn_figures
from laminar_py.records.evaluations import SetFigures
from laminar_py.records.events import Checkpointed, Evaluated, Relayed, Repacked
from laminar_py.records.metrics import TurnFigures
from laminar_py.records.trajectory import DropReason, Kind

EventKind = TypeVar("EventKind", Relayed, Repacked, Checkpointed)
ROOT = "relay-0"  # reads the learner's files, so no bytes reach it by wire


class LengthFigures(msgspec.Struct, frozen=True):
    """Response tokens of training trajectories."""

    p50: int
    p95: int
    p99: int


class Tokens(msgspec.Struct, frozen=True):
    """Response tokens of training."""

    generated: int
    trained: int


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Law 1: issued = consumed + dropped + live."""

    issued: int
    consumed: int
    dropped: int
    live: int
    dropped_by_reason: dict[str, int]


class StalenessFigures(msgspec.Struct, frozen=True):
    """Staleness of consumed trajectories, in learner steps."""

    mean: float
    max: int


class RelayFigures(msgspec.Struct, frozen=True):
    """Figures of weight versions; medians over versions, None without any."""

    versions: int  # published
    stall_s: float | None  # pause of the learner for a publish
    spread_s: float | None  # until the slowest relay had a version
    wire_share: float | None  # bytes over the wire, as a share of the full versions


class RepackFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Moves between replicas."""

    rounds: int  # with at least one move
    running: int  # moved trajectories with response tokens
    waiting: int  # moved trajectories without
    round_s: float | None  # median, from plan to the last hand-over
    prefill_max: int  # most tokens that one destination prefilled in one round


class CheckpointFigures(msgspec.Struct, frozen=True):
    """Figures of checkpoints; medians, None without any."""

    count: int
    stall_s: float | None  # pause of the learner
    elapsed_s: float | None  # until it was on disk


class EvaluationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluation of a set under a version, `rl_s` seconds into RL."""

    set_name: str
    step: int
    version: int
    rl_s: float
    figures: SetFigures

    @property
    def mean(self) -> float:
        """Mean reward; an accuracy if rewards are 0 or 1."""
        return self.figures.mean.value


class UnscoredFigures(msgspec.Struct, frozen=True):
    """Responses of training and evaluations whose scoring failed."""

    count: int
    of: int  # all responses that were to be scored
    first: str  # reason of the first failure


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run; durations in seconds, memory in bytes."""

    run: str
    finished: bool
    simulated: bool = False  # no tokens, no training; seconds of a virtual clock
    accuracy_start: float | None  # of the first set, if its rewards are 0 or 1
    accuracy_end: float | None
    rl_seconds: float
    steps: int
    response_length: LengthFigures
    turns: TurnFigures = TurnFigures()  # of finished training trajectories
    tokens: Tokens
    trained_tokens_per_s: float
    trajectories: Counts
    staleness: StalenessFigures
    versions_alive_max: int
    overlap_share: float
    learner_waiting_share: float
    peak_memory_bytes: int
    restarts: dict[str, int]
    evaluations: list[EvaluationFigures]
    relay: RelayFigures
    checkpoints: CheckpointFigures
    kv_use: float  # mean share of the replicas' KV caches over the RL phase
    repack: RepackFigures
    unscored: UnscoredFigures


def _events(connection: sqlite3.Connection, kind: type[EventKind]) -> Iterator[EventKind]:
    """Iterate over events of one type, in the order of the log."""
    tag = kind.__struct_config__.tag
    with closing(connection.execute("SELECT body FROM event WHERE kind = ? ORDER BY seq", (tag,))) as rows:
        yield from (event for (body,) in rows if isinstance(event := decode_event(body), kind))


def read_relay(connection: sqlite3.Connection) -> RelayFigures:
    """Read the figures of weight versions; a version whose learner crashed in its publish has no stall."""
    stalls = [stall_s for (stall_s,) in connection.execute("SELECT stall_s FROM version")]
    spreads: dict[int, float] = {}
    wire_bytes = num_bytes = 0
    for event in _events(connection, Relayed):
        if event.node != ROOT:
            spreads[event.version] = max(event.elapsed_s, spreads.get(event.version, 0.0))
            wire_bytes += event.wire_bytes
            num_bytes += event.num_bytes
    known = [stall_s for stall_s in stalls if stall_s]
    return RelayFigures(
        len(stalls),
        median(known) if known else None,
        median(spreads.values()) if spreads else None,
        wire_bytes / num_bytes if num_bytes else None,
    )


def read_repack(connection: sqlite3.Connection) -> RepackFigures:
    """Read the figures of repacking."""
    rounds = list(_events(connection, Repacked))
    return RepackFigures(
        rounds=len(rounds),
        running=sum(event.num_running for event in rounds),
        waiting=sum(event.num_waiting for event in rounds),
        round_s=median(event.elapsed_s for event in rounds) if rounds else None,
        prefill_max=max((event.prefill for event in rounds), default=0),
    )


def read_checkpoints(connection: sqlite3.Connection) -> CheckpointFigures:
    """Read the figures of checkpoints, deleted and rolled-back ones included."""
    events = list(_events(connection, Checkpointed))
    if not events:
        return CheckpointFigures(0, None, None)
    return CheckpointFigures(
        len(events), median(event.stall_s for event in events), median(event.elapsed_s for event in events)
    )


def read_unscored(connection: sqlite3.Connection) -> UnscoredFigures:
    """Read the figures of failed scoring."""
    reasons = (DropReason.REWARD_FAILED, DropReason.REWARD_TIMEOUT)
    ((count, of),) = connection.execute(
        "SELECT count(*) FILTER (WHERE drop_reason IN (?, ?)),"
        " count(*) FILTER (WHERE reward IS NOT NULL OR drop_reason IN (?, ?)) FROM trajectory",
        (*reasons, *reasons),
    )
    query = "SELECT drop_detail FROM trajectory WHERE drop_reason IN (?, ?) ORDER BY ended_s LIMIT 1"
    first = connection.execute(query, reasons).fetchone() if count else None
    return UnscoredFigures(count, of, "" if first is None else first[0])


def read_turn_figures(connection: sqlite3.Connection) -> TurnFigures:
    """Read the turns of training trajectories, for a run with an environment."""
    rows = (one for one in read_turns(connection) if one.kind is Kind.TRAIN)
    return turn_figures([(one.turns, one.environment_s) for one in rows])


def _lengths(connection: sqlite3.Connection) -> LengthFigures:
    lengths = _counts(connection, "length", "finish_reason IS NOT NULL")
    return LengthFigures(quantile(lengths, 0.5), quantile(lengths, 0.95), quantile(lengths, 0.99))


def _staleness(connection: sqlite3.Connection) -> StalenessFigures:
    staleness = _counts(connection, "staleness", "status = 'consumed'")
    total = sum(value * count for value, count in staleness.items())
    return StalenessFigures(total / max(1, staleness.total()), max(staleness, default=0))


def _counts(connection: sqlite3.Connection, column: str, condition: str) -> Counter[int]:
    """Count training trajectories that meet an SQL condition, by the value of a column."""
    query = f"SELECT {column}, count(*) FROM trajectory WHERE kind = 'train' AND {condition} GROUP BY {column}"
    with closing(connection.execute(query)) as rows:
        return Counter(dict(rows))


def _trajectories(connection: sqlite3.Connection) -> Counts:
    account = read_accounting(connection).train
    return Counts(
        issued=account.issued,
        consumed=account.consumed,
        dropped=sum(account.dropped.values()),
        live=account.live,
        dropped_by_reason={str(reason): count for reason, count in account.dropped.items()},
    )


def evaluation_figures(evaluations: Iterable[Evaluated]) -> list[EvaluationFigures]:
    """Convert evaluation events to figures of a summary."""
    return [
        EvaluationFigures(
            set_name=one.set_name, step=one.step, version=one.version, rl_s=one.rl_s, figures=one.figures
        )
        for one in evaluations
    ]


def _accuracy(evaluation: Evaluated | None) -> float | None:
    if evaluation is None or not evaluation.figures.is_accuracy:
        return None
    return evaluation.figures.mean.value


def summarise(
    run: RunFolder,
    stats: Stats,
    *,
    finished: bool,
    restarts: dict[str, int],
    sets: Iterable[str],
    has_environment: bool = False,
) -> Summary:
    """Write and return the summary of a run with an up-to-date ledger; `sets` in the order of the config."""
    totals = stats.totals
    with reading(run.live_ledger) as connection:
        evaluations = evaluations_on_record(connection)
        of_first = of_first_set(evaluations, sets)
        summary = Summary(
            run=str(run.path),
            finished=finished,
            simulated=is_simulated(connection),
            accuracy_start=_accuracy(next((one for one in of_first if one.step == 0), None)),
            accuracy_end=_accuracy(of_first[-1]) if finished and of_first else None,
            rl_seconds=stats.rl_s,
            steps=connection.execute("SELECT coalesce(max(step), 0) FROM step WHERE NOT undone").fetchone()[0],
            response_length=_lengths(connection),
            turns=read_turn_figures(connection) if has_environment else TurnFigures(),
            tokens=Tokens(totals.generated_tokens, totals.trained_tokens),
            trained_tokens_per_s=totals.trained_tokens / stats.rl_s if stats.rl_s else 0.0,
            trajectories=_trajectories(connection),
            staleness=_staleness(connection),
            versions_alive_max=totals.versions_alive_max,
            overlap_share=stats.overlap_share,
            learner_waiting_share=stats.learner_waiting_share,
            peak_memory_bytes=stats.peak_memory_bytes,
            restarts=restarts,
            evaluations=evaluation_figures(evaluations),
            relay=read_relay(connection),
            checkpoints=read_checkpoints(connection),
            kv_use=stats.kv_use,
            repack=read_repack(connection),
            unscored=read_unscored(connection),
        )
    write_summary(run, summary)
    return summary


def write_summary(run: RunFolder, summary: msgspec.Struct) -> None:
    """Write the summary into the run's folder by a rename, since a dashboard may read it."""
    partial = run.summary.with_suffix(".tmp")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    partial.replace(run.summary)
