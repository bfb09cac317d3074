"""The dashboard: who is let in, what it answers, and that an open page follows a run that goes on."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from laminar_lab.report.dashboard import Reader, check_binding, make_app
from laminar_lab.report.figures import metrics_text
from laminar_lab.report.page import distribution_panels
from laminar_lab.report.run_report import RunReport
from laminar_lab.report.snapshot import read_snapshot
from laminar_lab.report.tails import NAMES, OF_TURNS, Measure
from laminar_py.config.loading import dump_config, load_config
from laminar_py.records.events import PartCrashed
from laminar_py.records.trajectory import Status
from tests.ledger.runs import begin, checkpoint, consume, make_ready, open_ledger, undo_since
from tests.report.browser import PATIENCE_S, browsing, slow_in_browser
from tests.report.scripted import CONFIG
from tests.report.synthetic import simulate

GRAFANA = Path(__file__).parents[2] / "configs/grafana/laminar.json"
CHART = "document.querySelector('#timeline .chart')"
TOKEN = "a-secret-of-some-length"


@pytest.fixture
async def run(tmp_path):
    await simulate(tmp_path / "run", steps=5)
    (tmp_path / "run" / "config.yaml").write_text(dump_config(load_config(CONFIG, [])))
    return tmp_path / "run"


@asynccontextmanager
async def serving(reader, *, host="127.0.0.1", token=None):
    async with TestClient(TestServer(make_app(reader, host=host, token=token))) as client:
        yield client


def samples(text):
    families = text_string_to_metric_families(text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


async def test_the_page_is_served_with_data_that_is_sent_once(run):
    reader = Reader(run)
    async with serving(reader) as client:
        assert (await client.get("/data.json")).status == 503
        reader.refresh()
        page = await (await client.get("/")).text()
        assert '<script id="data" type="application/json">null</script>' in page
        first = await client.get("/data.json")
        assert (await first.json())["name"] == "run"
        again = await client.get("/data.json", headers={"If-None-Match": first.headers["ETag"]})
        assert again.status == 304
        assert (await client.get("/ledger.sqlite")).status == 404
        assert (await client.post("/data.json")).status == 405


async def test_a_foreign_host_name_is_refused(run):
    async with serving(Reader(run)) as client:
        for host, status in (("evil.example", 421), ("127.0.0.1.evil.example:80", 421), ("localhost:1", 200)):
            assert (await client.get("/", headers={"Host": host})).status == status, host


async def test_a_token_of_any_bytes_is_refused_and_nothing_is_logged(run, caplog):
    async with serving(Reader(run), token=TOKEN) as client:
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert b" 401 " in await reader.readline()
        writer.close()
    assert caplog.records == []


async def test_what_cannot_be_read_any_more_is_said_and_not_shown_as_if_it_were_new(run):
    reader, away = Reader(run), run.with_name("away")
    async with serving(reader) as client:
        reader.refresh()
        assert (await client.get("/metrics")).status == 200
        run.rename(away)
        keeping = asyncio.create_task(reader.run_forever())
        async with asyncio.timeout(PATIENCE_S):
            while (await client.get("/data.json")).status == 200:
                pass
        for path in ("/data.json", "/metrics"):
            answer = await client.get(path)
            assert answer.status == 503
            assert "no such file" in await answer.text()
        away.rename(run)
        reader.refresh()
        assert (await client.get("/metrics")).status == 200
        keeping.cancel()


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("summary.json", lambda whole: b'{"rl_sec', "summary.json: "),
        ("metrics.jsonl", lambda whole: b'{"step": "one"}\n' + whole, "metrics.jsonl: line 1: "),
        ("ledger.sqlite", lambda whole: whole[:4096] + bytes(len(whole) - 4096), "cannot be read"),
    ],
)
async def test_a_file_that_cannot_be_read_at_this_moment_does_not_end_the_dashboard(run, name, damage, words):
    path, reader = run / name, Reader(run)
    whole = path.read_bytes() if path.is_file() else b'{"rl_seconds": 1.0}'
    path.write_bytes(damage(whole))
    keeping = asyncio.create_task(reader.run_forever())
    async with asyncio.timeout(PATIENCE_S), serving(reader) as client:
        while words not in await (await client.get("/data.json")).text():
            assert not keeping.done()
        path.write_bytes(whole)
        reader.refresh()
        assert (await client.get("/data.json")).status == 200
    keeping.cancel()


async def test_a_line_that_is_torn_while_it_is_written_is_left_out(run):
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 99, "rl')
    reader = Reader(run)
    reader.refresh()
    assert not reader.trouble


async def test_with_a_token_nobody_else_is_let_in(run):
    async with serving(Reader(run), host="0.0.0.0", token=TOKEN) as client:
        for address in ("/", "/data.json", "/metrics", "/nowhere", "/?token=wrong", f"/?token={TOKEN}x"):
            assert (await client.get(address)).status == 401, address
        assert (await client.get("/", headers={"Authorization": f"Bearer {TOKEN}"})).status == 200
        assert (await client.get(f"/?token={TOKEN}")).status == 200


@pytest.mark.parametrize(
    ("host", "token", "word"), [("0.0.0.0", None, "--host=0.0.0.0"), ("gpu-7", None, "gpu-7"), ("::", "abc", "16")]
)
def test_nothing_listens_beyond_loopback_without_a_token(host, token, word):
    with pytest.raises(ValueError, match=re.escape(word)):
        check_binding(host, token)
    for own in ("127.0.0.1", "localhost", "::1"):
        check_binding(own, None)


async def test_the_record_is_read_again_only_when_it_has_grown(run):
    reader = Reader(run)
    reader.refresh()
    before = reader.drawn
    reader.refresh()
    assert reader.drawn is before
    async with open_ledger(run) as ledger:
        ledger.append(PartCrashed("replica-0", "a test"))
    reader.refresh()
    assert reader.drawn is not before
    assert samples(reader.drawn.metrics.decode())["laminar_crashes_total", "replica-0"] == 1


async def test_metrics_agree_with_the_ledger(run):
    report = RunReport(read_snapshot(run))
    train, found = report.snapshot.trajectories, samples(metrics_text(report).decode())
    assert found[("laminar_issued_total",)] == len(train)
    for status in Status:
        assert found["laminar_trajectories", status] == train.is_status(status).sum()
    consumed = train.is_status(Status.CONSUMED)
    assert found[("laminar_tokens_trained_total",)] == train.length[consumed].sum()
    assert found[("laminar_version_published",)] == found[("laminar_learner_step",)] == 5
    assert found["laminar_wall_info", report.diagnosis.binding.bottleneck] == 1
    assert found[("laminar_live",)] == 0
    assert found[("laminar_last_event_timestamp_seconds",)] == pytest.approx(report.snapshot.heard_s)


async def test_every_view_tells_the_same_of_lengths_and_times(run):
    report = RunReport(read_snapshot(run))
    exported = samples(metrics_text(report).decode())
    drawn = [chart for panel in distribution_panels(report.snapshot.trajectories) for chart in panel.charts]
    of_one_turn = [one for one in Measure if one not in OF_TURNS]
    assert [one.name for one in drawn] == [NAMES[one] for one in of_one_turn]
    for measure, one in zip(of_one_turn, drawn, strict=True):
        told = report.tails[measure]
        assert one.marks == [("p50", told.p50), ("p95", told.p95), ("p99", told.p99)]
        if measure is not Measure.LENGTH:
            assert exported["laminar_latency_seconds", "0.95", one.name] == told.p95


async def test_metrics_have_the_types_and_units_that_their_names_say(run):
    text = metrics_text(RunReport(read_snapshot(run))).decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families) > 30
    for family in families:
        assert family.documentation
        assert family.name.startswith("laminar_")
        assert not family.name.endswith(("_s", "_ms", "_mb"))
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample
            assert sample.value >= 0 or family.type == "gauge", sample
            assert len(sample.labels) <= 2


async def test_counters_do_not_fall_when_steps_are_undone(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1))
        for id in ("g0.0", "g0.1"):
            make_ready(ledger, id)
        ledger.append(checkpoint(0, 0))
        ledger.append_all(consume(1, 1, "g0.0", "g0.1"))
        await ledger.commit()
        before = samples(metrics_text(RunReport(read_snapshot(tmp_path))).decode())
        ledger.append_all(await undo_since(ledger, 0, reason="learner_crashed"))
        await ledger.commit()
        after = samples(metrics_text(RunReport(read_snapshot(tmp_path))).decode())
    counters = {name: value for name, value in before.items() if name[0].endswith("_total")}
    assert counters
    assert all(after[name] >= value for name, value in counters.items())
    assert after["laminar_trajectories", "consumed"] == 0


async def test_all_that_the_grafana_dashboard_draws_is_exported(run):
    board = json.loads(GRAFANA.read_text())
    named = set(re.findall(r"laminar_[a-z_]+", json.dumps([panel["targets"] for panel in board["panels"]])))
    text = metrics_text(RunReport(read_snapshot(run))).decode()
    exported = {name for name, *_ in samples(text)} | set(re.findall(r"# TYPE (\w+)", text))
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


async def test_ctrl_c_ends_it_in_the_midst_of_a_reading(run):
    reads_long = "from laminar_lab.report import dashboard as d; import time"
    reads_long += f"; d.Reader.refresh = lambda self: time.sleep({5 * PATIENCE_S})"
    async with (
        command(run, first=reads_long) as address,
        aiohttp.ClientSession() as session,
        session.get(f"{address}data.json") as answer,
    ):
        assert answer.status == 503


async def test_ctrl_c_ends_it_in_the_midst_of_a_question(run):
    asks_long = "from laminar_lab.report import dashboard as d; import time"
    asks_long += f"; d.answer_list = lambda run, _: (run / 'asked').touch() or time.sleep({5 * PATIENCE_S})"
    async with aiohttp.ClientSession() as session:
        async with command(run, first=asks_long) as address, asyncio.timeout(PATIENCE_S):
            asking = asyncio.create_task(session.get(f"{address}samples.json"))
            while not (run / "asked").exists():
                assert not asking.done()
                await asyncio.sleep(0.05)
        with pytest.raises(aiohttp.ClientError):
            await asking


async def test_what_ends_a_reading_unforeseen_ends_the_dashboard(run):
    reader = Reader(run)
    reader.refresh = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(PATIENCE_S):
            await reader.run_forever()


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
        async with aiohttp.ClientSession() as session, session.get(f"{address}metrics") as answer:
            assert samples(await answer.text())["laminar_crashes_total", "replica-1"] == 1
