"""The trace is what Perfetto and Chrome read (the trace event format)."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from laminar_py.analytics import trace
from laminar_py.analytics.trace import write_trace
from tests.analytics.synthetic import simulate

NEEDS = {  # keys of each kind of event, beside those that all have
    "M": {"args"},
    "X": {"ts", "dur"},
    "C": {"ts", "args"},
    "i": {"ts", "s"},
    "s": {"ts", "id", "cat"},
    "f": {"ts", "id", "cat", "bp"},
}


@pytest.fixture
async def events(tmp_path):
    await simulate(tmp_path, steps=5)
    written = json.loads(write_trace(tmp_path).read_text())
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
        if event["ph"] == "X" and event["pid"] >= trace.REPLICAS and event["tid"] != trace.WEIGHTS:
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert lanes
    for spans in lanes.values():
        assert all(end <= start + 1 for (_, end), (start, _) in pairwise(spans))


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
    written = json.loads(write_trace(tmp_path).read_text())
    stays = [e for e in written["traceEvents"] if e["ph"] == "X" and e["pid"] >= trace.REPLICAS and e["tid"]]
    shown, _, of = written["otherData"]["trajectories"].partition(" of ")
    assert 0 < len(stays) < 200 < int(of)
    assert len({e["name"] for e in stays}) == int(shown)
