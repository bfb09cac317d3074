"""The dashboard: whom it answers, what it answers, and that an open page follows a run that continues."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from laminar_lab.report.dashboard import Reader, make_server
from laminar_lab.report.metrics import metrics_text
from laminar_lab.report.page import distribution_panels
from laminar_lab.report.run_report import RunReport
from laminar_lab.report.snapshot import read_snapshot
from laminar_lab.report.tails import NAMES, OF_TURNS, Measure
from laminar_py.config.loading import dump_config, load_config
from laminar_py.config.section import ConfigError
from laminar_py.records.events import PartCrashed, VersionPublished
from laminar_py.records.trajectory import Status
from tests.ledger.runs import make_ready, open_ledger
from tests.report.browser import PATIENCE_S, browsing, slow_in_browser
from tests.report.scripted import CONFIG
from tests.report.synthetic import simulate

GRAFANA = Path(__file__).parents[2] / "configs/grafana/laminar.json"
CHART = "document.querySelector('#timeline .chart')"


@pytest.fixture
async def run(tmp_path):
    await simulate(tmp_path / "run", steps=5)
    (tmp_path / "run" / "config.yaml").write_text(dump_config(load_config(CONFIG, [])))
    return tmp_path / "run"


@contextmanager
def serving(run):
    """A function that gives status, headers and text for a path of the run's server."""
    with make_server(run, port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def get(path, **headers):
            request = Request(f"http://127.0.0.1:{server.server_address[1]}{path}", headers=headers)
            try:
                with urlopen(request, timeout=PATIENCE_S) as answer:
                    return answer.status, answer.headers, answer.read().decode()
            except HTTPError as error:
                return error.code, error.headers, error.read().decode()

        yield get
        server.shutdown()


def samples(text):
    families = text_string_to_metric_families(text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


async def test_the_page_is_served_with_data_that_is_sent_once(run):
    with serving(run) as get:
        _, _, page = get("/")
        assert '<script id="data" type="application/json">null</script>' in page
        _, headers, data = get("/data.json")
        assert json.loads(data)["name"] == "run"
        assert get("/data.json", **{"If-None-Match": headers["ETag"]})[0] == 304
        assert get("/ledger.sqlite")[0] == 404
        assert samples(get("/metrics")[2])[("laminar_live",)] == 0


async def test_a_foreign_host_name_is_refused(run):
    with serving(run) as get:
        for host, status in (("evil.example", 421), ("127.0.0.1.evil.example:80", 421), ("localhost:1", 200)):
            assert get("/", Host=host)[0] == status, host


def test_a_folder_without_a_run_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        make_server(tmp_path, port=0)


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("summary.json", lambda whole: b'{"rl_sec', "summary.json: "),
        ("metrics.jsonl", lambda whole: b'{"step": "one"}\n' + whole, "metrics.jsonl: line 1: "),
        ("ledger.sqlite", lambda whole: whole[:4096] + bytes(len(whole) - 4096), "cannot be read"),
    ],
)
async def test_a_file_that_cannot_be_read_at_this_moment_does_not_end_the_dashboard(run, name, damage, words):
    path = run / name
    whole = path.read_bytes() if path.is_file() else b'{"rl_seconds": 1.0}'
    with serving(run) as get:
        path.write_bytes(damage(whole))
        for place in ("/data.json", "/metrics"):
            status, _, text = get(place)
            assert (status, words in text) == (503, True)
        path.write_bytes(whole)
        assert get("/data.json")[0] == 200


async def test_a_line_that_is_torn_while_it_is_written_is_left_out(run):
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 99, "rl')
    assert Reader(run).newest().seq > 0


async def test_the_record_is_read_again_only_when_it_has_grown_and_a_reading_is_due(run, monkeypatch):
    monkeypatch.setattr("laminar_lab.report.dashboard.LEAST_S", 0.0)
    monkeypatch.setattr("laminar_lab.report.dashboard.SHARE", 1.0)
    reader = Reader(run)
    before = reader.newest()
    assert reader.newest() is before
    async with open_ledger(run) as ledger:
        ledger.append(PartCrashed("replica-0", "a test"))
    after = reader.newest()
    assert after.seq == before.seq + 1
    monkeypatch.setattr("laminar_lab.report.dashboard.LEAST_S", 60.0)
    reader = Reader(run)
    before = reader.newest()
    async with open_ledger(run) as ledger:
        ledger.append(PartCrashed("replica-0", "a test"))
    assert reader.newest() is before


async def test_after_a_failed_reading_the_earlier_page_is_served_until_the_next_is_due(run, monkeypatch):
    monkeypatch.setattr("laminar_lab.report.dashboard.LEAST_S", 0.0)
    monkeypatch.setattr("laminar_lab.report.dashboard.SHARE", 1.0)
    reader = Reader(run)
    before = reader.newest()
    async with open_ledger(run) as ledger:
        ledger.append(PartCrashed("replica-0", "a test"))
    (run / "metrics.jsonl").write_text('{"step": "one"}\n{}\n')
    monkeypatch.setattr("laminar_lab.report.dashboard.LEAST_S", 60.0)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: line 1"):
        reader.newest()
    assert reader.newest() is before


async def test_metrics_agree_with_the_ledger(run):
    report = RunReport(read_snapshot(run))
    train, found = report.snapshot.trajectories, samples(metrics_text(report).decode())
    for status in Status:
        assert found["laminar_trajectories", status] == train.is_status(status).sum()
    assert found[("laminar_run_trained_tokens",)] == report.snapshot.samples.steps[-1].trained_tokens
    assert found[("laminar_run_step",)] == 5
    published = [event.version for _, event in report.snapshot.history.of_kind(VersionPublished)]
    assert found[("laminar_published_version",)] == published[-1]
    assert found["laminar_bottleneck", report.diagnosis.binding.bottleneck] == 1
    assert found[("laminar_live",)] == 0
    assert found[("laminar_last_event_timestamp_seconds",)] == pytest.approx(report.snapshot.heard_s)


async def test_every_view_tells_the_same_of_lengths_and_times(run):
    report = RunReport(read_snapshot(run))
    drawn = [chart for panel in distribution_panels(report.snapshot.trajectories) for chart in panel.charts]
    of_one_turn = [one for one in Measure if one not in OF_TURNS]
    marks = {one.name: [(text.partition(" ")[0], at) for text, at in one.marks] for one in drawn}
    assert {*marks} == {NAMES[one] for one in of_one_turn}
    for measure in of_one_turn:
        told = report.tails[measure]
        assert marks[NAMES[measure]] == [("p50", told.p50), ("p95", told.p95), ("p99", told.p99)]


async def test_all_that_the_grafana_dashboard_draws_is_exported(run):
    board = json.loads(GRAFANA.read_text())
    named = set(re.findall(r"laminar_[a-z_0-9]+", json.dumps([panel["targets"] for panel in board["panels"]])))
    exported = {name for name, *_ in samples(metrics_text(RunReport(read_snapshot(run))).decode())}
    assert len(named) > 20
    assert named <= exported
    assert board["schemaVersion"] >= 39
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@asynccontextmanager
async def command(run, *, first=""):
    """`laminar dashboard` as a process of its own, which executes `first`; its address. Ends by Ctrl-C."""
    code = f"{first}; from laminar_py.cli import main; main()".removeprefix("; ")
    arguments = [sys.executable, "-c", code, "dashboard", str(run), "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "400"}
    process = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE, env=environment)
    try:
        async with asyncio.timeout(PATIENCE_S):
            line = (await process.stdout.readline()).decode()
        yield re.search(r"http://[^ ]+/", line)[0]
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_ctrl_c_ends_it_during_a_reading(run):
    reads_long = "from laminar_lab.report import dashboard as d; import time"
    reads_long += f"; d.read_snapshot = lambda run: (run / 'read').touch() or time.sleep({5 * PATIENCE_S})"
    async with command(run, first=reads_long) as address, asyncio.timeout(PATIENCE_S):
        host, port = address.removeprefix("http://").rstrip("/").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET /data.json HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        while not (run / "read").exists():
            assert not reader.at_eof()
            await asyncio.sleep(0.05)
    writer.close()


@slow_in_browser
async def test_an_open_page_follows_a_run_that_grows_and_keeps_its_zoom(tmp_path):
    run = tmp_path / "run"
    await simulate(run, steps=3, close=False)
    async with command(run) as address, browsing(tmp_path / "profile") as tab:
        await tab.open(address)
        assert await tab.look("laminar.page.live")
        await tab.look(f"(Plotly.relayout({CHART}, {{'xaxis.range': [2, 5]}}), 0)")
        before = await tab.look("laminar.page.seq")
        async with open_ledger(run) as ledger:
            make_ready(ledger, "g9000.0", index=9000)
            ledger.append(PartCrashed("replica-1", "a test"))
        await tab.until(f"laminar.page.seq >= {before} + 6")
        assert await tab.look(f"{CHART}.layout.xaxis.range") == [2, 5]
        assert "is running" in await tab.look("endOf({ live: true, heard_s: Date.now() / 1000 })")
        assert "killed" in await tab.look("endOf({ live: true, heard_s: Date.now() / 1000 - 3600 })")
        assert tab.errors == []
        assert all(url.startswith((address, "data:", "blob:")) for url in tab.requests)
