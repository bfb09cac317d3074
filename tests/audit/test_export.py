"""What other tools get of a run: files of trajectories, and answers to SQL."""

import json

import msgspec
import pytest

from laminar_lab.audit.export import export
from laminar_lab.audit.queries import select
from laminar_lab.audit.samples import read_sample
from laminar_py.ledger.rows import TRAJECTORY_COLUMNS
from laminar_py.records.events import Dropped, Restamped
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason
from tests.ledger.runs import (
    begin,
    checkpoint,
    consume,
    finish,
    issue,
    make_ready,
    open_ledger,
    run_to,
    tokens,
)


async def a_run(run):
    """Consumed, restamped and dropped, live with tokens, live without."""
    async with open_ledger(run) as ledger:
        begin(ledger, versions=(0, 1))
        make_ready(ledger, "g0.0", spans=((0, 0, 3), (1, 3, 7)))
        issue(ledger, "g1.0", index=1)
        run_to(ledger, "g1.0", [(0, 0, 3), (1, 3, 5)])
        ledger.append(Restamped("g1.0", (Span(0, 0, 2), Span(1, 2, 5, 0))))
        finish(ledger, "g1.0", [(0, 0, 2), (1, 2, 5, 0)])
        ledger.append(Dropped("g1.0", DropReason.STALE))
        ledger.append_all(consume(1, 1, "g0.0"))
        ledger.append(checkpoint(1, 1))
        issue(ledger, "g2.0", index=2)
        run_to(ledger, "g2.0", [(1, 0, 4)])
        issue(ledger, "g2.1", index=2)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_an_export_has_every_trajectory_once_with_what_the_ledger_says_of_it(tmp_path):
    await a_run(tmp_path)
    out = tmp_path / "out.jsonl"
    assert export(tmp_path, out, responses=True) == 4
    found = {record["id"]: record for record in read(out)}
    assert sorted(found) == ["g0.0", "g1.0", "g2.0", "g2.1"]
    for id, record in found.items():
        told = read_sample(tmp_path, id).story
        assert [record[name] for name in TRAJECTORY_COLUMNS] == msgspec.to_builtins(told.row)
        assert record["response_ids"] == told.response.ids.tolist()
        assert record["logprobs"] == pytest.approx(told.response.logprobs.tolist())
        assert record["token_spans"] == msgspec.json.decode(msgspec.json.encode(told.response.spans))
        assert (record["prompt_text"], record["prompt_ids"]) == (told.prompt, [2, 3, 4])
    assert found["g0.0"]["response_ids"] == tokens("g0.0", 0, 7)[0].tolist()


async def test_without_responses_an_export_is_the_table(tmp_path):
    await a_run(tmp_path)
    out = tmp_path / "out.jsonl"
    export(tmp_path, out)
    assert [record["id"] for record in read(out)] == ["g0.0", "g1.0", "g2.0", "g2.1"]
    assert set(read(out)[0]) == set(TRAJECTORY_COLUMNS)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("there.jsonl", "exists already; name a new file"),
        ("out.csv", "its suffix is not .jsonl"),
        ("no/out.jsonl", "does not exist; create it"),
    ],
)
async def test_an_export_that_cannot_be_is_refused_and_leaves_nothing(tmp_path, out, message):
    await a_run(tmp_path)
    (tmp_path / "there.jsonl").write_text("mine")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=message):
        export(tmp_path, tmp_path / out)
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "there.jsonl").read_text() == "mine"


def answer(run, statement):
    found = []
    select(run, statement, show=lambda names, rows: found.extend([names, *rows]))
    return found


async def test_sql_answers_what_one_select_asks(tmp_path):
    await a_run(tmp_path)
    query = "WITH t AS (SELECT status FROM trajectory) SELECT status, count(*) AS n FROM t GROUP BY 1 ORDER BY 1"
    assert answer(tmp_path, query) == [
        ["status", "n"],
        ("consumed", 1),
        ("dropped", 1),
        ("queued", 1),
        ("running", 1),
    ]


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM step",
        "CREATE TEMP TABLE t (x)",
        "PRAGMA user_version = 9",
        "ATTACH 'other.sqlite' AS other",
        "SELECT 1; DELETE FROM step",
        "SELECT nonsense FROM step",
        "SELEC",
        "",
    ],
)
async def test_sql_that_is_no_select_is_refused_in_one_line(tmp_path, statement):
    await a_run(tmp_path)
    before = (tmp_path / "ledger.sqlite").read_bytes()
    with pytest.raises(ValueError, match="sql=") as complaint:
        answer(tmp_path, statement)
    assert "\n" not in str(complaint.value)
    assert (tmp_path / "ledger.sqlite").read_bytes() == before
    assert not (tmp_path / "other.sqlite").exists()
