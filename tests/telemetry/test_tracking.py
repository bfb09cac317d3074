"""What a run tells its trackers, and that it waits for none of them. Real processes."""

import asyncio
import importlib.util
import logging
import re
import socket
from dataclasses import fields
from pathlib import Path

import psutil
import pytest

from laminar_py.config.loading import parse_config
from laminar_py.config.tracking import TrackerKind
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.clock import SystemClock
from laminar_py.records.events import Evaluated
from laminar_py.records.metrics import Mismatch, StepMetrics, TokenMetrics, Work
from laminar_py.telemetry.stats import Stats, StepRow, Totals
from laminar_py.telemetry.summary import summarise
from laminar_py.telemetry.tracker_process import Values
from laminar_py.telemetry.trackers import Opening
from laminar_py.telemetry.tracking import TrackerLink, Tracking, flat_row, flat_settings
from tests.ledger.runs import begin, open_ledger

REPO = Path(__file__).parent.parent.parent
ENOUGH_S = 60.0
KIND = TrackerKind.TENSORBOARD
needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")


def make_row(step, *, entropy=1.0):
    tokens = TokenMetrics(num_tokens=10, entropy=entropy, ratio=1.01, ratio_max=3.0, advantage_max=2.0)
    metrics = StepMetrics(
        loss=0.5,
        grad_norm=0.1,
        elapsed_s=2.0,
        tokens=tokens,
        by_staleness={"3-4": tokens, "9+": tokens},
        mismatch=Mismatch(0.1, 0.2, 0.3),
        work=Work(1000, 4e12, 8e12),
    )
    stats = Stats(SystemClock(), replicas=1, totals=Totals())
    facts = {"version": step, "batch": [], "generated_tokens": 0, "versions_alive": 1, "stall_s": 0.0}
    return stats.row(step=step, metrics=metrics, **facts)


def make_link(folder, *, kind=KIND, **limits):
    folder.mkdir(exist_ok=True)
    opening = Opening(kind=kind, folder=str(folder), name="math-1", project="math", settings={})
    return TrackerLink(opening, errors=folder / "tracker.log", **limits)


def scalars(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


def tracker_processes():
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "laminar_py.telemetry.tracker_process" in child.cmdline()]


SMALL = parse_config(
    {
        "name": "small",
        "steps": 3,
        "model": {"path": "m"},
        "data": {"train": "t"},
        "tracking": {"kinds": ["tensorboard"]},
    }
)


async def handled(link):
    """All that it was told arrived, or is lost."""
    async with asyncio.timeout(ENOUGH_S):
        await link._queue.join()


@needs_tensorboard
async def test_a_run_with_a_roll_back_is_in_its_tracker_as_it_went_in_the_end(tmp_path):
    run = RunFolder(tmp_path / "small-1")
    run.logs.mkdir(parents=True)
    tracking = Tracking(SMALL, run, resumed=False)
    tracking.start()
    for step, entropy in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 2.5), (3, 3.5)):
        tracking.step(make_row(step, entropy=entropy))
    tracking.evaluated(Evaluated(version=1, step=1, num_prompts=100, accuracy=0.75, rl_s=12.0))
    async with open_ledger(run.path) as ledger:
        begin(ledger, versions=(0,))
    summary = summarise(run, Stats(SystemClock(), replicas=1, totals=Totals()), finished=True, restarts={})
    await tracking.close(summary)
    assert scalars(run.path, "tokens/entropy") == [(1, 1.0), (2, 2.5), (3, 3.5)]
    assert scalars(run.path, "staleness_3-4/entropy") == [(1, 1.0), (2, 2.5), (3, 3.5)]
    assert scalars(run.path, "run/mfu") == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert scalars(run.path, "eval/accuracy") == [(1, 0.75)]
    assert scalars(run.path, "summary/finished") == [(3, 1.0)]
    assert tracker_processes() == []


@needs_tensorboard
async def test_a_run_that_resumes_from_its_beginning_has_every_step_once(tmp_path):
    run = RunFolder(tmp_path / "small-1")
    run.logs.mkdir(parents=True)
    for resumed, last in ((False, 2), (True, 3)):
        tracking = Tracking(SMALL, run, resumed=resumed)
        tracking.start()
        for step in range(1, last + 1):
            tracking.step(make_row(step, entropy=float(last)))
        for link in tracking._links:
            await handled(link)
        await tracking.close(None)
    assert scalars(run.path, "tokens/entropy") == [(1, 3.0), (2, 3.0), (3, 3.0)]


@needs_tensorboard
async def test_what_does_not_fit_the_queue_is_dropped_with_one_warning(tmp_path, caplog):
    link = make_link(tmp_path, queued=2)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            link.tell(Values(step, {}))
    assert [record.getMessage() for record in caplog.records] == [
        "tracker tensorboard: messages are dropped: 2 wait for it"
    ]
    link.start()
    await link.close({}, limit_s=ENOUGH_S)
    assert link.undelivered == 3


@needs_mlflow
async def test_a_server_that_never_answers_holds_nothing_up(tmp_path, monkeypatch, caplog):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        link = make_link(tmp_path, kind=TrackerKind.MLFLOW, queued=3)
        link.start()
        for step in range(4):
            link.tell(Values(step, {}))
            await asyncio.sleep(0)
        async with asyncio.timeout(ENOUGH_S):
            await asyncio.get_running_loop().sock_accept(set_nonblocking(silent))  # it has asked, and waits
        await link.close({"summary/finished": 1.0}, limit_s=0.1)
    assert link.undelivered == 5, "four rows and the end"
    assert "5 messages did not arrive" in caplog.text
    assert tracker_processes() == []


def set_nonblocking(server):
    server.setblocking(False)
    return server


@needs_tensorboard
async def test_a_tracker_that_is_killed_comes_back_and_goes_on(tmp_path):
    link = make_link(tmp_path, retry_s=0.05)
    link.start()
    link.tell(Values(1, {"tokens/entropy": 1.0}))
    await handled(link)
    (child,) = tracker_processes()
    child.kill()
    link.tell(Values(2, {"tokens/entropy": 2.0}))  # lost with it
    await handled(link)
    link.tell(Values(3, {"tokens/entropy": 3.0}))
    await link.close({}, limit_s=ENOUGH_S)
    assert link.undelivered == 1
    assert scalars(tmp_path, "tokens/entropy") == [(1, 1.0), (3, 3.0)]


@needs_tensorboard
async def test_a_tracker_that_cannot_begin_costs_its_own_messages_alone(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("a file where a folder should be")
    link = make_link(tmp_path, retry_s=0.05)
    link.start()
    for step in range(3):
        link.tell(Values(step, {}))
    await link.close({}, limit_s=ENOUGH_S)
    assert link.undelivered == 4
    assert "its process died (FileExistsError" in caplog.text
    assert caplog.text.count("messages are dropped") == 1


def test_every_metric_has_a_name_that_all_trackers_take_and_is_documented():
    row = flat_row(make_row(1))
    assert all(re.fullmatch(r"[\w\-. :/]+", name) for name in row)
    assert row["tokens/ratio_max"] == row["staleness_9_up/ratio_max"] == 3.0
    assert row["run/mismatch_p99"] == 0.2
    documented = set(re.findall(r"`(\w+)`", (REPO / "docs/metrics.md").read_text()))
    assert {field.name for field in fields(StepRow)} | set(TokenMetrics.__struct_fields__) <= documented


def test_what_a_cpu_cannot_say_is_left_out():
    row = make_row(1)
    row.mfu = None
    assert "run/mfu" not in flat_row(row)


def test_settings_have_dotted_names_and_no_nulls():
    tree = {"lr": 1e-6, "eval": {"at_seconds": [1.0, 2.0], "every": None}, "urls": [], "name": "a"}
    assert flat_settings(tree) == {"lr": 1e-6, "eval.at_seconds": "[1.0, 2.0]", "urls": "[]", "name": "a"}
