"""`laminar audit` as it is typed: what it prints, its exit codes, and one line for whatever is wrong."""

import json
import sqlite3
import sys

import pytest

from laminar_py.cli import main
from laminar_py.ledger.database import LEDGER_NAME
from laminar_py.ledger.seal import seal_run
from tests.audit.test_export import a_run
from tests.ledger.runs import begin, issue, open_ledger


@pytest.fixture
def laminar(monkeypatch, capsys):
    """Runs the command line; exit code, standard output and standard error."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["laminar", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return end.value.code or 0, said.out, said.err

    return run


async def test_a_run_that_keeps_the_laws_is_proved(tmp_path, laminar):
    await a_run(tmp_path)
    code, out, _ = laminar("audit", tmp_path, "verify")
    assert (code, out.splitlines()[0], out.splitlines()[-1]) == (
        0,
        "not sealed: the run is running, or was killed",
        "every law holds",
    )
    seal_run(tmp_path)
    code, out, _ = laminar("audit", tmp_path, "verify")
    assert (code, out.splitlines()[0][:15]) == (0, "sealed: 2 files")


async def test_a_broken_law_is_exit_code_1_and_a_line_for_each_breach(tmp_path, laminar):
    await a_run(tmp_path)
    next((tmp_path / "segments").iterdir()).unlink()
    code, out, _ = laminar("audit", tmp_path, "verify")
    assert code == 1
    assert "law 2: spans: g0.0: the piece from token 0 on: " in out
    assert out.splitlines()[-1] == "5 violations: broken are laws 2, see docs/laws.md"


async def test_list_and_sql_write_json_for_other_tools(tmp_path, laminar):
    await a_run(tmp_path)
    _, out, _ = laminar("audit", tmp_path, "list", "--status", "consumed", "--json")
    (row,) = map(json.loads, out.splitlines())
    assert (row["id"], row["staleness"], row["step"]) == ("g0.0", 0, 1)
    _, out, _ = laminar("audit", tmp_path, "sql", "SELECT id, digest FROM prompt LIMIT 1", "--json")
    assert len(json.loads(out)["digest"]) == 32
    _, out, _ = laminar("audit", tmp_path, "show", "g1.0")
    assert "from token 2 on: version 1, replica 0, on a KV cache from version 0 on" in out


async def test_a_list_ends_with_fifty_lines_and_a_count_unless_all_are_asked_for(tmp_path, laminar):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        for index in range(60):
            issue(ledger, f"g{index}.0", index=index)
    _, out, _ = laminar("audit", tmp_path, "list")
    *lines, last = out.splitlines()
    assert (len(lines), last) == (50, "50 of 60 trajectories; --all lists all")
    for words, count in (
        (("--all",), 60),
        (("--limit", "70"), 60),
        (("--group", "g7"), 1),
        (("--group", "g99"), 0),
    ):
        _, out, _ = laminar("audit", tmp_path, "list", *words)
        *lines, last = out.splitlines()
        assert (len(lines), last) == (count, f"{count} {'trajectory' if count == 1 else 'trajectories'}")
    _, out, _ = laminar("audit", tmp_path, "list", "--json")
    assert len(out.splitlines()) == 60


def nothing(path):
    path.unlink()


def other_program(path):
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE notes (x)")
    connection.close()


@pytest.mark.parametrize("command", [(), ("verify",), ("list",), ("show", "g0.0"), ("sql", "SELECT 1")])
@pytest.mark.parametrize("damage", [nothing, other_program])
async def test_what_is_no_ledger_is_one_line_and_exit_code_2(tmp_path, laminar, damage, command):
    await a_run(tmp_path)
    damage(tmp_path / LEDGER_NAME)
    code, _, err = laminar("audit", tmp_path, *command)
    assert (code, err.count("\n")) == (2, 1)
    assert f"ledger={tmp_path / LEDGER_NAME}: " in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("list", "--reward", "big"), "reward=big: not a comparison"),
        (("list", "--length", "> 3 4"), "length=> 3 4: not a comparison"),
        (("list", "--version", "9" * 20), "version=99999999999999999999: no such number is on record"),
        (("show", "g7.7"), "trajectory=g7.7: not in"),
        (("sql", "DROP TABLE step"), "sql='DROP TABLE step': not authorized"),
        (("export", "out.txt"), "out=out.txt: its suffix is not .jsonl"),
    ],
)
async def test_a_bad_question_is_one_line_and_exit_code_2(tmp_path, laminar, words, message):
    await a_run(tmp_path)
    code, _, err = laminar("audit", tmp_path, *words)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"laminar: {message}")
