"""The trace is what Perfetto and Chrome read (the trace event format)."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from laminar_lab.report import trace
from laminar_lab.report.run_report import RunReport
from laminar_lab.report.snapshot import read_snapshot
from laminar_lab.report.trace import write_trace
from tests.events import relayed
from tests.ledger.runs import begin, open_ledger
from tests.report.synthetic import simulate

NEEDS = {  # keys of each kind of event, beside those that all have
    "M": {"args"},
    "X": {"ts", "dur"},
    "C": {"ts", "args"},
    "i": {"ts", "s"},
    "s": {"ts", "id", "cat"},
    "f": {"ts", "id", "cat", "bp"},
}


def written_trace(run):
    return json.loads(write_trace(RunReport(read_snapshot(run))).read_text())


@pytest.fixture
async def events(tmp_path):
    await simulate(tmp_path, steps=5)
    written = written_trace(tmp_path)
    assert set(written) == {"traceEvents", "otherData", "displayTimeUnit"}
    return written["traceEvents"]


async def test_every_event_has_what_its_kind_needs(events):
    assert {event["ph"] for event in events} == set(NEEDS)
    for event in events:
        assert {"ph", "pid", "tid", "name"} | NEEDS[event["ph"]] <= set(event)
        assert all(isinstance(event[key], int) for key in ("pid", "tid", "ts", "dur", "id") if key in event)
        assert event.get("dur", 1) > 0


async def test_times_begin_at_zero_and_never_go_back(events):
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    assert times[0] == 0


async def test_slices_of_a_lane_do_not_overlap(events):
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert {trace.LEARNER, trace.SCORER, trace.RELAYS, trace.REPLICAS} <= {pid for pid, _ in lanes}
    for lane, spans in lanes.items():
        assert all(end <= start for (_, end), (start, _) in pairwise(spans)), lane


async def test_every_arrow_has_two_ends_each_within_a_slice_of_one_trajectory(events):
    slices = [event for event in events if event["ph"] == "X" and event["pid"] >= trace.REPLICAS]
    ends = {phase: {e["id"]: e for e in events if e["ph"] == phase} for phase in "sf"}
    assert ends["s"]
    assert set(ends["s"]) == set(ends["f"])
    for id, start in ends["s"].items():
        finish = ends["f"][id]
        assert start["ts"] <= finish["ts"]
        assert start["pid"] != finish["pid"]
        names = [
            {s["name"] for s in slices if at(s, end) and s["ts"] <= end["ts"] <= s["ts"] + s["dur"]}
            for end in (start, finish)
        ]
        assert names[0] & names[1]


def at(slice_, end):
    return (slice_["pid"], slice_["tid"]) == (end["pid"], end["tid"])


async def test_every_process_and_lane_has_a_name(events):
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"} <= named
    assert {e["pid"] for e in events} == processes


async def test_a_long_run_is_thinned_by_whole_trajectories(tmp_path, monkeypatch):
    await simulate(tmp_path, steps=5)
    monkeypatch.setattr(trace, "MOST_STAYS", 100)
    written = written_trace(tmp_path)
    residences = [e for e in written["traceEvents"] if e["ph"] == "X" and e["pid"] >= trace.REPLICAS and e["tid"]]
    shown, _, of = written["otherData"]["trajectories"].partition(" of ")
    assert 0 < len(residences) < 200 < int(of)
    assert len({e["name"] for e in residences}) == int(shown)


async def test_versions_that_a_relay_takes_at_a_time_lie_beside_each_other(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        for node, version, took_s in (("relay-10", 1, 3.0), ("relay-10", 2, 2.0), ("relay-9", 1, 1.0)):
            ledger.append(relayed(node, version, digest="d", elapsed_s=took_s, parent="relay-0"))
    events = written_trace(tmp_path)["traceEvents"]
    lanes = {
        e["tid"]: e["args"]["name"] for e in events if e["pid"] == trace.RELAYS and e["name"] == "thread_name"
    }
    of = {(lanes[e["tid"]], e["name"]) for e in events if e["pid"] == trace.RELAYS and e["ph"] == "X"}
    assert list(lanes.values()) == ["relay-9", "relay-10", "relay-10, beside 1"]
    assert of == {("relay-9", "version 1"), ("relay-10", "version 1"), ("relay-10, beside 1", "version 2")}
