"""Segments of a run whose controller died: what it left goes on, but for what is gone meanwhile."""

from laminar_lab.audit.verify import verify
from laminar_py.ledger.database import segments_path
from laminar_py.ledger.recovery import recover
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.ledger.segments.writer import JOURNAL, Journal
from laminar_py.records.events import Dropped, Interrupted
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason, FinishReason, Status
from laminar_py.runtime.workers.segments import RunSegments, restore_live
from tests.control.fleet import Fleet, make_piece
from tests.ledger.runs import begin, open_ledger
from tests.workers.fakes import make_incarnation


def run_segments(run, ledger, *, number=2):
    return RunSegments(make_incarnation(run=RunFolder(run), ledger=ledger, number=number))


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


async def taken_up(run):
    """The fleet of the next controller, and what it recorded."""
    async with open_ledger(run) as ledger:
        recovered = recover(run)
        begin(ledger, versions=(), incarnation=2)
        recorder = Keeping(ledger)
        fleet = Fleet(replicas=2, capacity=2, recorder=recorder, segments=segments_path(run))
        fleet.scheduler.pause()
        await restore_live(recovered, run_segments(run, ledger), fleet.scheduler)
        await ledger.commit()
        return fleet, recorder.events


async def test_what_ran_goes_on_at_the_length_and_under_the_version_that_its_journal_has(tmp_path):
    await play(tmp_path)
    fleet, events = await taken_up(tmp_path)
    live = fleet.scheduler.state.live
    assert [(live[name].length, live[name].last_version) for name in ("g0.0", "g0.1", "g0.3")] == [
        (5, 1),
        (4, 0),
        (0, None),
    ]
    assert {event.reason for event in events if isinstance(event, Interrupted)} == {"controller_crashed"}
    assert not list(segments_path(tmp_path).glob(f"*{JOURNAL}")), "the next start need not read them"
    assert not [event for event in events if isinstance(event, Dropped)]
    assert [trajectory.id for trajectory in fleet.unscored] == ["g0.2"]
    assert verify(tmp_path) == []


async def test_what_is_gone_meanwhile_is_dropped_and_begun_anew(tmp_path):
    await play(tmp_path)
    for path in segments_path(tmp_path).glob("replica-1-*"):
        path.unlink()
    fleet, events = await taken_up(tmp_path)
    dropped = {event.trajectory_id: event for event in events if isinstance(event, Dropped)}
    assert {name: event.reason for name, event in dropped.items()} == dict.fromkeys(
        ["g0.2", "g1.0"], DropReason.TOKENS_LOST
    )
    assert all("is gone, or ends before" in event.detail for event in dropped.values())
    live = fleet.scheduler.state.live
    assert {"g0.4", "g1.4"} <= live.keys()
    assert live["g0.0"].length == 5, "of what is there nothing is lost"


async def test_a_segment_that_ends_too_early_has_lost_what_lay_behind(tmp_path):
    await play(tmp_path)
    (path,) = segments_path(tmp_path).glob("replica-1-*")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    fleet, events = await taken_up(tmp_path)
    assert [event.trajectory_id for event in events if isinstance(event, Dropped)] == ["g1.0"]
    assert fleet.scheduler.state.live["g0.2"].status is Status.FINISHED


async def test_journals_go_once_what_they_had_is_on_record_and_a_dead_parts_own_alone(tmp_path):
    folder = segments_path(tmp_path)
    other = Journal(folder, "replica-1-1-9")
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        fleet = Fleet(replicas=1, capacity=1, recorder=ledger)
        segments = run_segments(tmp_path, ledger)
        await fleet.report(0)
        name, item = next(iter(fleet.running[0].items()))
        label = segments.new_label("replica-0")
        journal = Journal(folder, label)
        for one in (journal, other):
            one.write([make_piece(item, 0, 2, (Span(0, 0, 2),))])
        answer = await segments.salvage(label, fleet.scheduler.incoming.running_on(0))
        assert [(one.trajectory_id, one.tokens.end) for one in answer.found] == [(name, 2)]
        await fleet.lose_replica(0, salvaged=answer.found)
        await segments.discard(answer.journals)
        assert {path.name.split(".")[0] for path in folder.glob(f"*{JOURNAL}")} == {"replica-1-1-9"}
