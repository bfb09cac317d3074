"""Texts for the page: which ones a report has, and what a dashboard answers to questions about them."""

import asyncio
import sqlite3
from contextlib import closing

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from laminar_lab.audit.queries import Filters, listing
from laminar_lab.audit.samples import SampleOrder, read_sample
from laminar_lab.report import dashboard, texts
from laminar_lab.report.dashboard import Reader, make_app
from laminar_lab.report.texts import answer_list, embed_texts, fit_for_page
from tests.ledger.runs import begin, open_ledger
from tests.report.browser import PATIENCE_S
from tests.report.synthetic import simulate
from tests.report.written import write_run

TOKEN = "a-secret-of-some-length"


@pytest.fixture
async def run(tmp_path):
    return await write_run(tmp_path)


@pytest.fixture
async def client(run):
    async with TestClient(TestServer(make_app(Reader(run), host="127.0.0.1", token=None))) as client:
        yield client


def ids(body):
    return [row["id"] for row in msgspec.json.decode(body)["rows"]]


def embedded(run):
    return [msgspec.json.decode(view) for view in embed_texts(run).samples]


async def test_a_report_has_the_newest_steps_evaluations_and_drops_with_their_siblings(run):
    views = embedded(run)
    assert {view["row"]["id"] for view in views} == {"g0.0", "g0.1", "g1.0", "e2-heldout.0"}
    assert [visit["group_id"] for visit in views[1]["history"]] == [f"e{place}-heldout" for place in range(3)]


async def test_texts_in_a_report_are_bounded_and_those_that_fit_are_whole(tmp_path, monkeypatch):
    await simulate(tmp_path / "run", steps=4)
    every = embedded(tmp_path / "run")
    bound = len(msgspec.json.encode(every)) // 3
    monkeypatch.setattr(texts, "MOST_BYTES", bound)
    some = embed_texts(tmp_path / "run").samples
    assert 0.8 * bound < sum(len(bytes(view)) for view in some) <= bound
    assert [msgspec.json.decode(view) for view in some][:5] == every[:5]
    monkeypatch.setattr(texts, "MOST_READ", 7)
    monkeypatch.setattr(texts, "MOST_BYTES", 2**30)
    assert len(embedded(tmp_path / "run")) == 7


async def test_what_cannot_be_read_leaves_a_report_with_the_reason(run):
    whole = (run / "ledger.sqlite").read_bytes()
    (run / "ledger.sqlite").write_bytes(whole[:4096] + bytes(len(whole) - 4096))
    found = embed_texts(run)
    assert found.samples == []
    assert "cannot be read" in found.trouble


async def test_a_response_with_a_gap_costs_no_other_and_is_shown_with_the_reason(run):
    whole = embedded(run)
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection, connection:
        connection.execute("DELETE FROM piece WHERE trajectory = 1 AND name = '' AND start = 0")
    assert embed_texts(run).trouble == ""
    found = embedded(run)
    assert [view for view in found if not view["lost"]] == [one for one in whole if one["row"]["id"] != "g0.0"]
    (gap,) = (view for view in found if view["lost"])
    assert (gap["row"]["id"], gap["tokens"], gap["columns"]) == ("g0.0", [], {})
    assert gap["lost"].startswith("trajectory=g0.0: ")
    async with TestClient(TestServer(make_app(Reader(run), host="127.0.0.1", token=None))) as client:
        answer = await client.get("/sample.json?id=g0.0")
        assert answer.status == 200
        assert (await answer.json())["lost"] == gap["lost"]
        assert (await client.get("/sample.json?id=g0.1")).status == 200


async def test_a_run_without_any_trajectory_has_no_texts(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
    assert embed_texts(tmp_path) == texts.EmbeddedTexts([])


async def test_a_page_has_rounded_numbers_and_the_newest_visits_with_its_own(run, monkeypatch):
    monkeypatch.setattr(texts, "MOST_VISITS", 1)
    for at in range(3):
        sample = read_sample(run, f"e{at}-heldout.0")
        found = fit_for_page(sample)
        assert found.logprobs == pytest.approx(sample.logprobs, abs=1e-4)
        assert (found.tokens, found.ids) == (sample.tokens, sample.ids)
        assert [visit.group_id for visit in found.history] == [f"e{n}-heldout" for n in sorted({at, 2})]


@pytest.mark.parametrize(
    ("query", "filters"),
    [
        ({}, {}),
        ({"status": "dropped"}, {"status": "dropped"}),
        ({"reason": "stale"}, {"reason": "stale"}),
        ({"kind": "eval", "reward": ">=0.5"}, {"kind": "eval", "reward": ">=0.5"}),
        ({"set": "heldout"}, {"eval_set": "heldout"}),
        ({"prompt": "p'\"<b>", "step": "1"}, {"prompt": "p'\"<b>", "step": "1"}),
        ({"group": "g0", "length": ">1"}, {"group": "g0", "length": ">1"}),
        ({"version": "2"}, {"version": 2}),
        ({"replica": "1", "staleness": "<3"}, {"replica": 1, "staleness": "<3"}),
        ({"prompt": "\udcff' OR 1=1"}, {"prompt": "?' OR 1=1"}),
    ],
)
async def test_the_list_has_the_filters_of_the_audit(run, client, query, filters):
    expected = [row.id for row in listing(run, Filters(**filters))]
    assert ids(answer_list(run, {**query, "order": "oldest"})) == expected
    if "\udcff" not in str(query):
        answer = await client.get("/samples.json", params={**query, "order": "oldest"})
        assert ids(await answer.read()) == expected
        assert (await answer.json())["matching"] == len(expected)


async def test_the_list_has_every_order_and_is_bounded(run, client):
    for order in SampleOrder:
        found = ids(await (await client.get("/samples.json", params={"order": order})).read())
        assert found, order
        first = await (await client.get("/samples.json", params={"order": order, "limit": 1})).json()
        assert [row["id"] for row in first["rows"]] == found[:1]
        assert first["matching"] == 6


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("samples.json?status=lost", "status=lost: no such status; name one of queued, "),
        ("samples.json?order=random", "order=random: no such order; name one of contrast, "),
        ("samples.json?reward=high", "reward=high: not a comparison; write for example '>3'"),
        ("samples.json?version=-1", "version=-1: not a whole number; write for example version=3"),
        (f"samples.json?replica={10**30}", "not a whole number"),
        ("samples.json?limit=0", "limit=0: out of bounds; ask for 1 to 500"),
        ("samples.json?limit=501", "limit=501: out of bounds"),
        ("samples.json?colour=red", "colour=red: no such filter; there are status, "),
        ("sample.json", "id: not named"),
        ("sample.json?id=g9.9", "trajectory=g9.9: not in "),
        ("sample.json?id=g0.0&model=/etc", "id: not named, or not alone"),
    ],
)
async def test_a_bad_question_is_answered_by_one_line(client, address, words):
    answer = await client.get(f"/{address}")
    assert answer.status == 400
    said = await answer.text()
    assert words in said
    assert "\n" not in said


async def test_bytes_that_are_no_characters_pass_no_filter(client):
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(b"GET /samples.json?prompt=%ff\xff%00 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        status = await reader.readline()
        rest = await reader.read()
    writer.close()
    assert b" 200 " in status or b" 400 " in status
    assert b"Traceback" not in rest


async def test_texts_need_the_token_as_all_else(run):
    async with TestClient(TestServer(make_app(Reader(run), host="0.0.0.0", token=TOKEN))) as client:
        for address in ("/samples.json", "/sample.json?id=g0.0"):
            sign = "&" if "?" in address else "?"
            assert (await client.get(address)).status == 401
            answer = await client.get(f"{address}{sign}token={TOKEN}")
            assert answer.status == 200
            assert answer.headers["Cache-Control"] == "no-store"


async def test_a_ledger_that_is_gone_is_503_and_no_bad_question(run, client):
    (run / "ledger.sqlite").rename(run / "away")
    for address in ("/samples.json", "/sample.json?id=g0.0"):
        answer = await client.get(address)
        assert answer.status == 503
        assert "no such file" in await answer.text()


async def test_questions_are_answered_one_at_a_time_and_few_wait(run, monkeypatch):
    at_once, most = 0, 0
    go = asyncio.Event()

    async def slow(work):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await go.wait()
        at_once -= 1
        return work()

    monkeypatch.setattr(dashboard, "_in_daemon_thread", slow)
    answers = dashboard.TextQueries(run)
    asked = [asyncio.create_task(answers.answer(answer_list, {})) for _ in range(dashboard.MOST_QUERIES + 1)]
    async with asyncio.timeout(PATIENCE_S):
        first, *_ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().status for task in first] == [503]
        go.set()
        statuses = [answer.status for answer in await asyncio.gather(*asked)]
    assert statuses == [200] * dashboard.MOST_QUERIES + [503]
    assert most == 1
