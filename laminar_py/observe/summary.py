"""`summary.json`: figures of a run at its end, from its ledger and the controller's counters.

The controller writes it at the end of a run; `laminar train`, trackers and the launcher read it.
"""

import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from statistics import median

import msgspec

from laminar_py.ledger.database import reading
from laminar_py.ledger.evaluations import evaluations_on_record, of_first_set
from laminar_py.ledger.recovery import is_simulated
from laminar_py.ledger.rows import read_accounting, read_events, read_turns
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.observe.stats import Stats, quantile, turn_figures
from laminar_py.records.evaluations import SetFigures
from laminar_py.records.events import (
    Checkpointed,
    Evaluated,
    Event,
    LearnerLoaded,
    Relayed,
    Repacked,
    VersionPublished,
)
from laminar_py.records.metrics import TurnFigures
from laminar_py.records.trajectory import DropReason, Kind, Status

ROOT = "relay-0"  # reads the learner's files directly, so its bytes do not cross the wire
SCORING_FAILED = (DropReason.REWARD_FAILED, DropReason.REWARD_TIMEOUT)


class LengthFigures(msgspec.Struct, frozen=True):
    """Quantiles of the response lengths of training trajectories, in tokens."""

    p50: int
    p95: int
    p99: int


class Tokens(msgspec.Struct, frozen=True):
    """Response tokens that replicas generated for training and that steps trained on."""

    generated: int
    trained: int


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of training trajectories; issued = consumed + dropped + live (law 1)."""

    issued: int
    consumed: int
    dropped: int
    live: int
    dropped_by_reason: dict[str, int]
    replayed: int = 0  # times that a step trained on a consumed trajectory again


class StalenessFigures(msgspec.Struct, frozen=True):
    """Staleness of consumed trajectories, in learner steps."""

    mean: float
    max: int


class RelayFigures(msgspec.Struct, frozen=True):
    """Figures of weight versions; medians over versions, None without versions."""

    versions: int  # published
    stall_s: float | None  # pause of the learner for a publish
    spread_s: float | None  # seconds until the slowest relay had a version
    wire_share: float | None  # bytes over the wire, as a share of the full versions


class RepackFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of repacking: moves of trajectories between replicas."""

    rounds: int  # with at least one move
    running: int  # moved trajectories with response tokens
    waiting: int  # moved trajectories without response tokens
    round_s: float | None  # median, from plan to the last hand-over
    prefill_max: int  # most tokens that one replica prefilled in one round


class CheckpointFigures(msgspec.Struct, frozen=True):
    """Figures of checkpoints; medians, None without checkpoints."""

    count: int
    stall_s: float | None  # pause of the learner
    elapsed_s: float | None  # until a checkpoint was on disk


class EvaluationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of an evaluation set under a version, `rl_s` seconds into RL."""

    set_name: str
    step: int
    version: int
    rl_s: float
    figures: SetFigures

    @property
    def mean(self) -> float:
        """Mean reward; an accuracy if the reward is a verdict."""
        return self.figures.mean.value


class UnscoredFigures(msgspec.Struct, frozen=True):
    """Responses of training and evaluations whose scoring failed."""

    count: int
    of: int  # all responses with a score or a failed scoring
    first: str  # reason of the first failure


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run; durations in seconds, memory in bytes."""

    run: str
    finished: bool
    simulated: bool = False  # no tokens, no training; seconds of a virtual clock
    accuracy_start: float | None  # of the first set, if its reward is a verdict
    accuracy_end: float | None
    rl_seconds: float
    steps: int
    trained_steps: int  # the other steps trained nothing: no group had signal, or every update was skipped
    response_length: LengthFigures
    turns: TurnFigures = TurnFigures()  # of finished training trajectories
    tokens: Tokens
    trained_tokens_per_s: float
    trajectories: Counts
    staleness: StalenessFigures
    versions_alive_max: int
    overlap_share: float
    learner_waiting_share: float
    attention: str = (
        ""  # the learner's kernel, with kernels that failed their check; "" before a learner is loaded
    )
    peak_memory_bytes: int
    restarts: dict[str, int]
    evaluations: list[EvaluationFigures]
    relay: RelayFigures
    checkpoints: CheckpointFigures
    kv_use: float  # mean share of the replicas' KV caches over the RL phase
    repack: RepackFigures
    unscored: UnscoredFigures


def _median(values: Collection[float]) -> float | None:
    return median(values) if values else None


def relay_figures(events: Sequence[Event]) -> RelayFigures:
    """Return the figures of weight versions from the ledger's events."""
    published = [event for event in events if isinstance(event, VersionPublished)]
    relayed = [event for event in events if isinstance(event, Relayed) and event.node != ROOT]
    spreads: dict[int, float] = {}
    for event in relayed:
        spreads[event.version] = max(event.elapsed_s, spreads.get(event.version, 0.0))
    stalls = [event.stall_s for event in published if event.stall_s]
    num_bytes = sum(event.num_bytes for event in relayed)
    return RelayFigures(
        len({event.version for event in published}),
        _median(stalls),
        _median(spreads.values()),
        sum(event.wire_bytes for event in relayed) / num_bytes if num_bytes else None,
    )


def repack_figures(events: Sequence[Event]) -> RepackFigures:
    """Return the figures of all repack rounds in the ledger's events."""
    rounds = [event for event in events if isinstance(event, Repacked)]
    return RepackFigures(
        rounds=len(rounds),
        running=sum(event.num_running for event in rounds),
        waiting=sum(event.num_waiting for event in rounds),
        round_s=_median([event.elapsed_s for event in rounds]),
        prefill_max=max((event.prefill for event in rounds), default=0),
    )


def attention_in_use(events: Sequence[Event]) -> str:
    """Return the attention kernel of the last learner, e.g. "varlen (not used, flash2: it raised ...)"."""
    loaded = [event for event in events if isinstance(event, LearnerLoaded)]
    if not loaded:
        return ""
    refused = loaded[-1].refused
    return loaded[-1].attention + (f" (not used, {'; '.join(refused)})" if refused else "")


def checkpoint_figures(events: Sequence[Event]) -> CheckpointFigures:
    """Return the figures of all recorded checkpoints, also of deleted and rolled-back ones."""
    saved = [event for event in events if isinstance(event, Checkpointed)]
    stalls, elapsed = [event.stall_s for event in saved], [event.elapsed_s for event in saved]
    return CheckpointFigures(len(saved), _median(stalls), _median(elapsed))


def evaluation_figures(evaluations: Iterable[Evaluated]) -> list[EvaluationFigures]:
    """Convert the events of evaluations to records of a summary."""
    return [
        EvaluationFigures(
            set_name=event.set_name, step=event.step, version=event.version, rl_s=event.rl_s, figures=event.figures
        )
        for event in evaluations
    ]


def _unscored_figures(connection: sqlite3.Connection) -> UnscoredFigures:
    """Count scored and unscored responses in the ledger, and return the reason of the first failure."""
    failed = "drop_reason IN (?, ?)"
    count, scored = connection.execute(
        f"SELECT count(*) FILTER (WHERE {failed}), count(reward) FROM trajectory", SCORING_FAILED
    ).fetchone()
    query = f"SELECT drop_detail FROM trajectory WHERE {failed} ORDER BY ended_s LIMIT 1"
    first = connection.execute(query, SCORING_FAILED).fetchone() if count else None
    return UnscoredFigures(count, scored + count, "" if first is None else first[0])


def _length_figures(connection: sqlite3.Connection) -> LengthFigures:
    query = "SELECT length, count(*) FROM trajectory WHERE kind = ? AND finish_reason IS NOT NULL GROUP BY length"
    lengths = Counter(dict(connection.execute(query, (Kind.TRAIN,))))
    return LengthFigures(*(quantile(lengths, q) for q in (0.50, 0.95, 0.99)))


def _turn_figures(connection: sqlite3.Connection) -> TurnFigures:
    found = [(row.turns, row.environment_s) for row in read_turns(connection) if row.kind is Kind.TRAIN]
    return turn_figures(found)


def _count_trajectories(connection: sqlite3.Connection) -> Counts:
    """Count the training trajectories in the ledger by their state."""
    account = read_accounting(connection).train
    return Counts(
        issued=account.issued,
        consumed=account.consumed,
        dropped=sum(account.dropped.values()),
        live=account.live,
        dropped_by_reason={str(reason): count for reason, count in account.dropped.items()},
        replayed=account.replayed,
    )


def _staleness_figures(connection: sqlite3.Connection) -> StalenessFigures:
    """Return mean and maximum staleness of consumed training trajectories in the ledger; 0 without any."""
    query = "SELECT avg(staleness), max(staleness) FROM trajectory WHERE kind = ? AND status = ?"
    mean, most = connection.execute(query, (Kind.TRAIN, Status.CONSUMED)).fetchone()
    return StalenessFigures(mean or 0.0, most or 0)


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
    """Write `summary.json` of a run whose ledger is up to date; return the summary."""
    totals = stats.totals
    with reading(run.ledger) as connection:
        evaluations = evaluations_on_record(connection)
        events = list(read_events(connection, VersionPublished, Relayed, Repacked, Checkpointed, LearnerLoaded))
        first_set = of_first_set(evaluations, sets)
        counted = "SELECT coalesce(max(step), 0), count(loss) FROM step WHERE NOT undone"
        steps, trained_steps = connection.execute(counted).fetchone()
        summary = Summary(
            run=str(run.path),
            finished=finished,
            simulated=is_simulated(connection),
            accuracy_start=_accuracy(next((result for result in first_set if result.step == 0), None)),
            accuracy_end=_accuracy(first_set[-1]) if finished and first_set else None,
            rl_seconds=stats.rl_s,
            steps=steps,
            trained_steps=trained_steps,
            response_length=_length_figures(connection),
            turns=_turn_figures(connection) if has_environment else TurnFigures(),
            tokens=Tokens(totals.generated_tokens, totals.trained_tokens),
            trained_tokens_per_s=totals.trained_tokens / stats.rl_s if stats.rl_s else 0.0,
            trajectories=_count_trajectories(connection),
            staleness=_staleness_figures(connection),
            versions_alive_max=totals.versions_alive_max,
            overlap_share=stats.overlap_share,
            learner_waiting_share=stats.learner_waiting_share,
            attention=attention_in_use(events),
            peak_memory_bytes=stats.peak_memory_bytes,
            restarts=restarts,
            evaluations=evaluation_figures(evaluations),
            relay=relay_figures(events),
            checkpoints=checkpoint_figures(events),
            kv_use=stats.kv_use,
            repack=repack_figures(events),
            unscored=_unscored_figures(connection),
        )
    write_summary(run, summary)
    return summary


def write_summary(run: RunFolder, summary: msgspec.Struct) -> None:
    """Write `summary.json` into the run's folder; a rename replaces it, so a reader never sees half of it."""
    partial = run.summary.with_suffix(".tmp")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    partial.replace(run.summary)
