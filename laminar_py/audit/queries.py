"""Answers about a run from its ledger, for the command line, the report and the dashboard. Reads only.

`run` is a run folder (or a ledger file); all raise a one-line `ValueError` if there is no readable ledger.
"""

import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from laminar_py.events import AnyEvent
from laminar_py.store.archive import find_payload
from laminar_py.store.database import ledger_path, reading
from laminar_py.store.payload import Payload
from laminar_py.store.rows import Accounting, TrajectoryRow, decode_event, read_accounting, read_rows
from laminar_py.types import DropReason, Kind, Status

_COMPARISON = re.compile(r"(>=|<=|>|<|=)?\s*(\d+)")


@dataclass(frozen=True, slots=True)
class Filters:
    """Which trajectories to list, e.g. `Filters(status=Status.CONSUMED, staleness=">3")`; None: all."""

    status: Status | None = None
    reason: DropReason | None = None
    staleness: str | None = None  # a number, with `=`, `<`, `<=`, `>` or `>=` before it
    kind: Kind | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True)
class StoryEvent:
    """One event of a trajectory, `since_s` seconds after its issue."""

    seq: int
    since_s: float
    host: str
    event: AnyEvent


@dataclass(frozen=True, slots=True)
class Story:
    """Everything about one trajectory; which step used it, its reward and the like are in `row`."""

    row: TrajectoryRow
    prompt: str
    answer: str
    events: tuple[StoryEvent, ...]
    response: Payload  # token ids, log-probabilities and the versions they came from


def accounting(run: Path) -> Accounting:
    """Issued, consumed, dropped by reason and live, at this moment."""
    with reading(run) as connection:
        return read_accounting(connection)


def staleness_histogram(run: Path) -> dict[int, int]:
    """How many trajectories the learner consumed at each staleness, lowest first."""
    with reading(run) as connection:
        rows = connection.execute(
            "SELECT staleness, count(*) FROM trajectory WHERE status = 'consumed' AND kind = 'train'"
            " GROUP BY staleness ORDER BY staleness"
        )
        return dict(rows.fetchall())


def listing(run: Path, filters: Filters) -> Iterator[TrajectoryRow]:
    """Trajectories that pass all filters, in the order of issue. Raises `ValueError` on a bad comparison."""
    conditions = {
        "status = ?": filters.status,
        "drop_reason = ?": filters.reason,
        "kind = ?": filters.kind,
        "group_id = ?": filters.group,
    }
    if filters.staleness is not None:
        sign, number = parse_comparison(filters.staleness)
        conditions[f"staleness {sign} CAST(? AS INTEGER)"] = number
    used = {condition: value for condition, value in conditions.items() if value is not None}
    with reading(run) as connection:
        yield from read_rows(connection, " AND ".join(used) or "1", tuple(map(str, used.values())))


def story(run: Path, trajectory_id: str) -> Story:
    """What happened to one trajectory. Raises `ValueError` if it does not exist."""
    with reading(run) as connection:
        row = next(iter(read_rows(connection, "id = ?", (trajectory_id,))), None)
        if row is None:
            raise ValueError(
                f"trajectory={trajectory_id}: not in {ledger_path(run)}; `laminar audit list` names them all"
            )
        prompt = connection.execute("SELECT text, answer FROM prompt WHERE id = ?", (row.prompt_id,)).fetchone()
        text, answer = prompt or ("", "")
        folder = ledger_path(run).parent
        response = find_payload(folder, connection, row)
        return Story(row, text, answer, tuple(_events(connection, row)), response)


def tell_response(response: Payload) -> list[str]:
    """Lines about a response: one for each of its spans, and one for each kind of recording it has."""
    lines = []
    for span in response.spans:
        cache = "" if span.kv_version is None else f", on a KV cache from version {span.kv_version} on"
        lines.append(f"tokens {span.start} to {span.end}: version {span.version}{cache}")
    mask, experts = response.sampling_mask, response.routed_experts
    if mask is not None:
        mean = len(mask.ids) / max(len(mask.counts), 1)
        lines.append(f"sampling mask: {len(mask.counts)} tokens, each of {mean:.1f} on average")
    if experts is not None:
        shape = f"{experts.layers} layers, {experts.top_k} in each"
        lines.append(f"routed experts: positions {experts.start} to {experts.start + experts.positions}, {shape}")
    return lines


def parse_comparison(text: str) -> tuple[str, str]:
    """Sign and number of a comparison: `>3` gives `(">", "3")`, `3` gives `("=", "3")`."""
    match = _COMPARISON.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"staleness={text}: not a comparison; write for example '>3', '<=1' or '2'")
    return match[1] or "=", match[2]


def _events(connection: sqlite3.Connection, row: TrajectoryRow) -> Iterator[StoryEvent]:
    # between its first and last event: there is no index on `subject`, which would cost every append
    cursor = connection.execute(
        "SELECT seq, wall, mono, host, body FROM event WHERE seq BETWEEN ? AND ? AND subject = ? ORDER BY seq",
        (row.first_seq, row.last_seq, row.id),
    )
    origin: tuple[float, float, str] | None = None
    for seq, wall, mono, host, body in cursor:
        if origin is None:
            origin = wall, mono, host
        # monotonic clocks of two hosts have nothing in common, nor have those of two boots of one
        same_clock = host == origin[2] and mono >= origin[1]
        since_s = mono - origin[1] if same_clock else wall - origin[0]
        yield StoryEvent(seq, since_s, host, decode_event(body))
