"""Payload of a run whose controller died: what it left goes on, but for what is gone meanwhile. On one host."""

import asyncio
from types import SimpleNamespace

from msgspec import structs

from laminar_lab.audit.verify import verify
from laminar_py.ledger.database import segments_path
from laminar_py.ledger.recovery import recover
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.ledger.segments.writer import JOURNAL, Journal, SegmentWriter
from laminar_py.records.events import Dropped, Interrupted
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason, FinishReason, Status
from laminar_py.runtime.workers import payload as payload_module
from laminar_py.runtime.workers.payload import PayloadHosts, restore_live
from tests.control.fleet import Fleet, make_piece
from tests.ledger.runs import begin, open_ledger
from tests.segments.pieces import random_piece
from tests.workers.fakes import make_incarnation


def hosts(monkeypatch, run, ledger, *, number=2):
    """The only host of a run, on which functions run here."""

    async def on_node(node, function, *arguments, apart):
        return function(*arguments)

    monkeypatch.setattr(payload_module, "on_node", on_node)
    here = SimpleNamespace(node="a")
    placement = SimpleNamespace(spread=False, here=here, ip=lambda node: "10.0.0.1")
    config = SimpleNamespace(supervisor=SimpleNamespace(heartbeat_timeout_s=1.0))
    incarnation = make_incarnation(
        config=config, run=RunFolder(run), ledger=ledger, placement=placement, number=number
    )
    return PayloadHosts(incarnation)


class Keeping:
    """A recorder that keeps events beside the ledger."""

    def __init__(self, ledger):
        self._ledger = ledger
        self.events = []

    def append(self, event):
        self.events.append(event)
        self._ledger.append(event)

    def __getattr__(self, name):
        return getattr(self._ledger, name)


async def play(run):
    """A controller dies: of g0 one has told tokens and noted more, one has noted some, one has finished.

    What finished, and what had begun of g1, was on replica 1.
    """
    async with open_ledger(run) as ledger:
        begin(ledger, versions=(0, 1))
        fleet = Fleet(replicas=2, capacity=2, recorder=ledger, segments=segments_path(run), one_version=False)
        await fleet.report(0)
        fleet.scheduler.pause()
        for name in ("g0.2", "g1.0"):
            await fleet.finish(0, name, tokens=0, reason=FinishReason.ABORT)
        fleet.scheduler.continue_live()
        await fleet.report(1)
        await fleet.grow(0, "g0.0", tokens=3)
        await fleet.finish(1, "g0.2")
        await fleet.grow(1, "g1.0", tokens=2)
        items = fleet.running[0]
        noted = [
            make_piece(items["g0.0"], 3, 5, (Span(1, 3, 5),)),
            make_piece(items["g0.1"], 0, 4, (Span(0, 0, 4),)),
        ]
        Journal(segments_path(run), "replica-0-1-0").write(noted)


async def taken_up(monkeypatch, run, *, went_back=False):
    """The fleet of the next controller, and what it recorded."""
    async with open_ledger(run) as ledger:
        recovered = recover(run)
        begin(ledger, versions=(), incarnation=2)
        recorder = Keeping(ledger)
        fleet = Fleet(replicas=2, capacity=2, recorder=recorder, segments=segments_path(run))
        fleet.scheduler.pause()
        payload = hosts(monkeypatch, run, ledger)
        payload._run.went_back = went_back
        await restore_live(recovered, payload, fleet.scheduler)
        await ledger.commit()
        return fleet, recorder.events


async def test_what_ran_goes_on_at_the_length_and_under_the_version_that_its_journal_has(monkeypatch, tmp_path):
    await play(tmp_path)
    fleet, events = await taken_up(monkeypatch, tmp_path)
    live = fleet.scheduler.book.live
    assert [(live[name].length, live[name].last_version) for name in ("g0.0", "g0.1", "g0.3")] == [
        (5, 1),
        (4, 0),
        (0, None),
    ]
    assert {event.reason for event in events if isinstance(event, Interrupted)} == {"controller_crashed"}
    assert not [event for event in events if isinstance(event, Dropped)]
    assert [trajectory.id for trajectory in fleet.unscored] == ["g0.2"]
    assert verify(tmp_path) == []


async def test_a_run_that_went_back_to_a_copy_takes_nothing_from_journals(monkeypatch, tmp_path):
    await play(tmp_path)
    fleet, _ = await taken_up(monkeypatch, tmp_path, went_back=True)
    live = fleet.scheduler.book.live
    assert [live[name].length for name in ("g0.0", "g0.1")] == [3, 0], "what came later is not on record"
    assert not list(segments_path(tmp_path).glob(f"*{JOURNAL}"))


async def test_what_is_gone_meanwhile_is_dropped_and_begun_anew(monkeypatch, tmp_path):
    await play(tmp_path)
    for path in segments_path(tmp_path).glob("replica-1-*"):
        path.unlink()
    fleet, events = await taken_up(monkeypatch, tmp_path)
    dropped = {event.trajectory_id: event for event in events if isinstance(event, Dropped)}
    assert {name: event.reason for name, event in dropped.items()} == dict.fromkeys(
        ["g0.2", "g1.0"], DropReason.HOST_LOST
    )
    assert all("is on no host" in event.detail for event in dropped.values())
    live = fleet.scheduler.book.live
    assert {"g0.4", "g1.4"} <= live.keys()
    assert live["g0.0"].length == 5, "of what is there nothing is lost"


async def test_a_segment_that_ends_too_early_has_lost_what_lay_behind(monkeypatch, tmp_path):
    await play(tmp_path)
    (path,) = segments_path(tmp_path).glob("replica-1-*")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    fleet, events = await taken_up(monkeypatch, tmp_path)
    assert [event.trajectory_id for event in events if isinstance(event, Dropped)] == ["g1.0"]
    assert fleet.scheduler.book.live["g0.2"].status is Status.FINISHED


async def test_journals_go_once_what_they_had_is_on_record_and_a_dead_parts_own_alone(monkeypatch, tmp_path):
    folder = segments_path(tmp_path)
    other = Journal(folder, "replica-1-1-9")
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        fleet = Fleet(replicas=1, capacity=1, recorder=ledger)
        payload = hosts(monkeypatch, tmp_path, ledger)
        await fleet.report(0)
        name, item = next(iter(fleet.running[0].items()))
        label = await payload.new_label("replica-0", "a")
        journal = Journal(folder, label)
        for one in (journal, other):
            one.write([make_piece(item, 0, 2, (Span(0, 0, 2),))])
        answer = await payload.salvage(label, fleet.scheduler.reports.running_on(0))
        assert [(one.trajectory_id, one.tokens.end) for one in answer.found] == [(name, 2)]
        await fleet.lose_replica(0, salvaged=answer.found)
        await payload.salvaged(label, answer)
        assert {path.name.split(".")[0] for path in folder.glob(f"*{JOURNAL}")} == {"replica-1-1-9"}


async def test_a_host_whose_disk_stands_still_holds_nobody_up(monkeypatch, tmp_path, caplog):
    async def stuck(node, function, *arguments, apart):
        await asyncio.Event().wait()

    async with open_ledger(tmp_path) as ledger, asyncio.timeout(10):
        begin(ledger)
        fleet = Fleet(replicas=1, capacity=1, recorder=ledger)
        payload = hosts(monkeypatch, tmp_path, ledger)
        await fleet.report(0)
        label = await payload.new_label("replica-0", "a")
        monkeypatch.setattr(payload_module, "on_node", stuck)
        monkeypatch.setattr(payload_module, "ANSWER_S", 0.05)
        monkeypatch.setattr(payload_module, "WRITE_S", 0.05)
        assert await payload.archive(1, fleet.scheduler) == 0
        answer = await payload.salvage(label, fleet.scheduler.reports.running_on(0))
        assert (answer.found, answer.journals) == ([], [])
    assert "segments_here on 10.0.0.1: no answer" in caplog.text
    assert "salvage on 10.0.0.1: no answer" in caplog.text


async def tidied(payload, fleet, monkeypatch, *, while_asked):
    """What is done while hosts look for their segments; they have been written long ago."""
    files = payload._files

    async def looked():
        found = await files()
        await while_asked()
        return {node: [structs.replace(one, age_s=99.0) for one in mine] for node, mine in found.items()}

    monkeypatch.setattr(payload, "_files", looked)
    await payload.archive(0, fleet.scheduler)


async def test_a_segment_that_is_told_of_while_hosts_are_asked_stays(monkeypatch, tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        fleet = Fleet(replicas=1, capacity=1, recorder=ledger, segments=segments_path(tmp_path))
        payload = hosts(monkeypatch, tmp_path, ledger)
        await fleet.report(0)
        name = next(iter(fleet.running[0]))
        idle = SegmentWriter(segments_path(tmp_path), "replica-0-1-7").write(random_piece(tokens=3))
        segment = fleet.writers[0].write(random_piece(tokens=3)).segment

        async def tell():
            await fleet.grow(0, name, tokens=3)

        await tidied(payload, fleet, monkeypatch, while_asked=tell)
        assert fleet.scheduler.book.live[name].segments == {segment}
        there = {path.name for path in segments_path(tmp_path).glob("*.segment")}
        assert there == {f"{segment}.segment"}, f"{idle.segment} is of no use"


async def test_what_two_salvages_found_stays_until_each_is_told(monkeypatch, tmp_path):
    folder = segments_path(tmp_path)
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        fleet = Fleet(replicas=1, capacity=1, recorder=ledger)
        payload = hosts(monkeypatch, tmp_path, ledger)
        await fleet.report(0)
        answers = []
        for part, item in zip(("replica-0", "replica-1"), fleet.running[0].values(), strict=False):
            label = await payload.new_label(part, "a")
            Journal(folder, label).write([make_piece(item, 0, 2, (Span(0, 0, 2),))])
            answers.append(await payload.salvage(label, fleet.scheduler.reports.running_on(0)))

        async def nothing():
            pass

        await tidied(payload, fleet, monkeypatch, while_asked=nothing)
        found = [one.tokens.at.segment for answer in answers for one in answer.found]
        assert len(set(found)) == 2
        assert {path.name for path in folder.glob("*.segment")} == {f"{segment}.segment" for segment in found}


async def test_a_segment_of_a_part_that_is_gone_stays_for_a_while(monkeypatch, tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        fleet = Fleet(replicas=1, capacity=1, recorder=ledger)
        payload = hosts(monkeypatch, tmp_path, ledger)
        SegmentWriter(segments_path(tmp_path), "replica-0-1-7").write(random_piece(tokens=3))
        await payload.archive(0, fleet.scheduler)
        assert list(segments_path(tmp_path).glob("replica-0-1-7.*")), "somebody may be about to tell of it"
        await payload.close(fleet.scheduler)
        assert not list(segments_path(tmp_path).glob("replica-0-1-7.*"))
