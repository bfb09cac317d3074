"""The ledger: order, atomicity, refusals, files it will not open."""

import asyncio
import time
from contextlib import closing

import numpy as np
import pytest
from msgspec.structs import replace

from laminar_lab.audit.queries import accounting
from laminar_lab.audit.stored import stored_pieces
from laminar_lab.audit.verify import verify
from laminar_py.ledger import database
from laminar_py.ledger.database import LEDGER_NAME, logs_of, open_writer, reading, segments_path
from laminar_py.ledger.ledger import Ledger
from laminar_py.ledger.machine import IllegalEventError, Machine
from laminar_py.ledger.pieces import piece_rows
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.records.events import (
    Assigned,
    Consumed,
    Dropped,
    Interrupted,
    Issued,
    Ready,
    Restamped,
    RolledBack,
    RunStarted,
    Scored,
    StreamLost,
    Undone,
    VersionPublished,
)
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason, Kind, Prompt
from tests.builders import make_experts
from tests.events import finished
from tests.ledger.runs import (
    Ticks,
    begin,
    consume,
    finish,
    issue,
    make_ready,
    open_ledger,
    replayed,
    run_to,
    store,
)

NO_IDS = np.empty(0, np.int32)


def query(run, sql):
    with reading(run) as connection:
        return connection.execute(sql).fetchall()


def wait_for_rows(run, sql, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not query(run, sql):
        assert time.monotonic() < end, f"no rows in {timeout_s} s: {sql}"
        time.sleep(0.01)


async def test_a_commit_returns_when_all_before_it_is_on_disk_in_order(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        make_ready(ledger, "g0.0")
        await ledger.commit()
        kinds = [kind for (kind,) in query(tmp_path, "SELECT kind FROM event ORDER BY seq")]
        assert kinds == ["runstarted", "versionpublished", "issued", "assigned", "finished", "scored", "ready"]


async def test_a_flush_comes_without_a_commit(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        await asyncio.to_thread(wait_for_rows, tmp_path, "SELECT * FROM incarnation")
        assert query(tmp_path, "SELECT count(*) FROM event") == [(2,)]


async def test_a_reader_never_sees_half_a_step(tmp_path):
    def read():
        for _ in range(200):
            rows = query(
                tmp_path,
                "SELECT count(*), (SELECT coalesce(sum(num_trajectories), 0) FROM step),"
                " (SELECT count(*) FROM event WHERE kind = 'consumed') FROM trajectory WHERE status = 'consumed'",
            )
            assert len(set(rows[0])) == 1
            assert accounting(tmp_path).balanced

    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        reader = asyncio.create_task(asyncio.to_thread(read))
        for step in range(1, 40):
            ids = [f"g{step}.{i}" for i in range(32)]
            for id in ids:
                make_ready(ledger, id, index=step)
            ledger.append_all(consume(step, step, *ids))
            await ledger.commit()
        await asyncio.wait_for(reader, 30)
    assert verify(tmp_path) == []


async def test_a_refused_event_leaves_its_whole_batch_off_the_disk(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        make_ready(ledger, "g0.0")
        await ledger.commit()
    with pytest.raises(IllegalEventError, match=r"g0\.1"):
        async with open_ledger(tmp_path) as ledger:
            ledger.append_all(consume(1, 0, "g0.0", "g0.1"))
    assert accounting(tmp_path).train.consumed == 0
    assert verify(tmp_path) == []


def ended(length, *, epoch=1, spans=((0, 0, 5),)):
    whole = tuple(Span(*span) for span in spans)
    return finished("g0.0", whole, epoch=epoch, length=length)


def issued(id, index=0):
    return Issued(
        trajectory_id=id, group_id="g0", prompt_id="p0", prompt_index=index, sample_index=0, kind=Kind.TRAIN
    )


SCORED = Scored(trajectory_id="g0.0", reward=1.0, elapsed_s=0.1)
PUBLISHED = VersionPublished(version=0, step=1, incarnation=1, parent=None, digest="d", num_bytes=1, stall_s=0.1)
STARTED = RunStarted(
    incarnation=1, host="host-1", pid=7, schema=1, config_digest="c", drain=False, max_staleness=None
)


@pytest.mark.parametrize(
    ("state", "event"),
    [
        ("queued", issued("g0.0")),
        ("queued", Interrupted(trajectory_id="g0.0", epoch=0, length=0, reason="stopped")),
        ("queued", Assigned("g0.0", 0, 1, 3)),
        ("queued", Assigned("g0.9", 0, 1, 0)),
        ("queued", StreamLost("g0.0", 0, 0)),
        ("running", StreamLost("g0.0", 0, 4)),
        ("running", Restamped("g0.0", (Span(0, 0, 4),))),
        ("running", Assigned("g0.0", 1, 2, 5)),
        ("running", ended(4)),
        ("running", ended(5, epoch=2)),
        ("running", ended(5, spans=((0, 0, 3), (0, 4, 5)))),
        ("running", SCORED),
        ("ready", SCORED),
        ("ready", Undone("g0.0", 1)),
        ("consumed", Consumed(trajectory_id="g0.0", step=2, version=0, staleness=0, weight=1.0)),
        ("consumed", Dropped("g0.0", DropReason.STALE)),
        ("consumed", Undone("g0.0", 2)),
        ("ready", replayed(2)),
        ("consumed", replayed(1)),
        ("consumed", replayed(2, weight=float("inf"))),
        ("consumed", replayed(2, id="g0.9")),
        ("consumed", consume(1, 0)[0]),
        ("consumed", PUBLISHED),
        ("consumed", STARTED),
        ("consumed", replace(consume(2, 0)[0], loss=float("nan"))),
    ],
)
async def test_an_event_that_cannot_happen_is_refused_and_changes_nothing(tmp_path, state, event):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        issue(ledger, "g0.0")
        if state != "queued":
            run_to(ledger, "g0.0", [(0, 0, 5)])
        if state in ("ready", "consumed"):
            finish(ledger, "g0.0", [(0, 0, 5)])
        if state == "consumed":
            ledger.append_all(consume(1, 0, "g0.0"))
        before = ledger.accounting()
        with pytest.raises(IllegalEventError):
            ledger.append(event)
        assert ledger.accounting() == before
    (row,) = query(tmp_path, "SELECT status FROM trajectory")
    assert row == (state,)


@pytest.mark.parametrize("state", ["pending", "flushed"])
async def test_a_trajectory_is_consumed_once_and_replayed_many_times_but_once_a_step(tmp_path, state):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        make_ready(ledger, "g0.0")
        ledger.append_all(consume(1, 0, "g0.0"))
        if state == "flushed":
            await ledger.commit()
        for step in (2, 3):
            ledger.append(replayed(step))
            with pytest.raises(IllegalEventError, match="replayed it before"):
                ledger.append(replayed(step))
            ledger.append(replace(consume(step, 0)[0], num_trajectories=1))
        account = ledger.accounting().train
        assert (account.consumed, account.replayed, account.balanced) == (1, 2, True)
        ledger.append(RolledBack(2, "learner_crashed"))
        assert ledger.accounting().train.replayed == 1
        await ledger.commit()
    assert accounting(tmp_path).train.replayed == 1
    assert query(tmp_path, "SELECT step, undone FROM replay ORDER BY seq") == [(2, 0), (3, 1)]


@pytest.mark.parametrize("state", ["pending", "flushed"])
async def test_an_undone_trajectory_is_ready_again(tmp_path, state):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        make_ready(ledger, "g0.0")
        ledger.append_all(consume(1, 0, "g0.0"))
        if state == "flushed":
            await ledger.commit()
        ledger.append(Undone("g0.0", 1))
        assert ledger.accounting().train.live == 1
    assert query(tmp_path, "SELECT status, step, advantage FROM trajectory") == [("ready", None, 0.5)]


async def test_pieces_of_a_response_must_join(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        issue(ledger, "g0.0")
        run_to(ledger, "g0.0", [(0, 0, 3)])
        for start, spans in ((2, (Span(0, 2, 4),)), (4, (Span(0, 4, 6),)), (3, (Span(0, 3, 4),)), (3, ())):
            with pytest.raises(IllegalEventError, match=r"g0\.0"):
                store(ledger, "g0.0", start, start + 2, spans)
        store(ledger, "g0.0", 3, 3, (), routed_experts=make_experts(0, 5))
        store(ledger, "g0.0", 3, 5, (Span(0, 3, 5),))
    assert query(tmp_path, "SELECT start, end, routed FROM piece") == [(0, 3, 0), (3, 3, 5), (3, 5, 0)]
    with reading(tmp_path) as connection:
        pieces = list(stored_pieces(PayloadReader(segments_path(tmp_path)), piece_rows(connection)))
    assert [(one.tokens.start, len(one.tokens.ids)) for one in pieces] == [(0, 12), (3, 0), (3, 8)]


async def test_what_an_engine_corrected_cannot_finish_otherwise(tmp_path):
    spans = ((0, 0, 2), (1, 2, 5, 0))
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1, 2))
        issue(ledger, "g0.0")
        run_to(ledger, "g0.0", [(0, 0, 3), (2, 3, 5)])
        ledger.append(Restamped("g0.0", tuple(Span(*span) for span in spans)))
        with pytest.raises(IllegalEventError, match="it was restamped"):
            ledger.append(ended(5, spans=((0, 0, 3), (1, 3, 5))))
        finish(ledger, "g0.0", spans)
    row = query(tmp_path, "SELECT oldest_version, newest_version, restamped FROM trajectory")
    assert row == [(0, 1, 5)], "nothing was generated under version 2"


async def test_a_write_that_fails_ends_the_ledger_with_its_own_error(tmp_path):
    ledger = Ledger(tmp_path / LEDGER_NAME, host="host-1", clock=Ticks())
    await ledger.start()
    ledger.store_prompt(Prompt(id="p0", index=0, text="2+2=", ids=NO_IDS, answer="4"))
    await ledger.commit()
    begin(ledger)
    ledger.store_prompt(Prompt(id="p0", index=0, text="2+3=", ids=NO_IDS, answer="5"))
    for _ in range(2):
        with pytest.raises(AssertionError, match="prompt p0"):
            await asyncio.wait_for(ledger.commit(), 20)
    with pytest.raises(AssertionError, match="prompt p0"):
        begin(ledger)
    with pytest.raises(AssertionError, match="prompt p0"):
        await asyncio.wait_for(ledger.close(), 20)
    assert query(tmp_path, "SELECT text, (SELECT count(*) FROM event) FROM prompt") == [("2+2=", 0)]


async def test_a_cancelled_commit_harms_no_later_one(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        waiting = asyncio.create_task(ledger.commit())
        await asyncio.sleep(0)
        waiting.cancel()
        issue(ledger, "g0.0")
        await ledger.commit()
        assert query(tmp_path, "SELECT count(*) FROM event") == [(3,)]


def test_memory_holds_live_trajectories_only():
    machine = Machine(recall=lambda _: None)
    for index in range(100):
        begun = issued("g0.0", index), Assigned("g0.0", 0, 1, 0)
        end = ended(0, spans=()), SCORED, Ready("g0.0", 0.0)
        used = Consumed(trajectory_id="g0.0", step=1, version=0, staleness=0, weight=1.0)
        for event in (*begun, *end, used if index % 2 else Dropped("g0.0", DropReason.STALE)):
            machine.apply(1, event, wall=1.0, mono=1.0)
    assert machine.live == {}
    assert machine.accounting().train.consumed == 50


@pytest.mark.parametrize("damage", ["missing", "empty", "text", "truncated", "half"])
async def test_a_file_that_is_no_ledger_is_named_in_one_line(tmp_path, damage):
    path = tmp_path / LEDGER_NAME
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        for index in range(100):
            make_ready(ledger, f"g{index}.0", index=index)
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        damaged = {
            "empty": b"",
            "text": b"hello" * 999,
            "truncated": whole[:9000],
            "half": whole[: len(whole) // 2],
        }
        path.write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=str(path)) as complaint:
        verify(tmp_path)
    assert "\n" not in str(complaint.value)
    if damage not in ("missing", "empty"):  # which are laid out anew
        with pytest.raises(ValueError, match=str(path)):
            open_writer(path)


async def test_a_trajectory_knows_when_it_was_where_by_the_monotonic_clock(tmp_path, monkeypatch):
    walls = iter(range(1000, 0, -1))  # a wall clock that goes back
    monkeypatch.setattr(time, "time", lambda: float(next(walls)))
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)  # at 1000 s, then a second for each event
        make_ready(ledger, "g0.0")
        ledger.append_all(consume(1, 0, "g0.0"))
    times = query(tmp_path, "SELECT issued_s, started_s, finished_s, scored_s, ready_s, ended_s FROM trajectory")
    assert times == [(1002.0, 1003.0, 1004.0, 1005.0, 1006.0, 1008.0)]
    assert verify(tmp_path) == []


def test_the_log_shrinks_after_a_long_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "_LOG_BYTES", 1 << 20)
    path = tmp_path / LEDGER_NAME
    with closing(open_writer(path)) as writer:
        with reading(tmp_path) as reader:
            reader.execute("SELECT count(*) FROM event").fetchone()
            for number in range(4):
                writer.execute("INSERT INTO head VALUES (?, zeroblob(?))", (number, 1 << 20))
            assert logs_of(path)[0].stat().st_size > 4 << 20
        for _ in range(3):
            writer.execute("INSERT INTO head VALUES (9, x'')")
        assert logs_of(path)[0].stat().st_size <= 1 << 20
