"""Records of simulations: read like those of any run, true to the run, and told from those of real ones."""

import json
import sqlite3
import sys

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from laminar_lab.audit.verify import prove
from laminar_lab.report.figures import headline
from laminar_lab.report.page import make_page
from laminar_lab.report.run_report import read_report
from laminar_py.cli import app, main
from laminar_py.config.section import ConfigError
from laminar_py.ledger.database import LEDGER_NAME, reading
from laminar_py.ledger.row_files import read_rows
from laminar_py.ledger.rows import read_accounting, read_events, trajectory_rows
from laminar_py.ledger.run_folder import RunFolder, runs_of
from laminar_py.observe.summary import Summary
from laminar_py.records.events import SettingChanged
from laminar_py.records.metrics import FleetRow, StepRow
from laminar_py.runtime.orchestrator.resume import refuse_simulated
from tests.simulate.small import CONFIG, FAILING, SMALL, run, run_recorded, small

CASES = {
    "repacked": (),
    "failing": FAILING,
    "in place, slow links, one scorer, some fail": (
        *FAILING,
        "rollout.on_new_weights=in_place",
        "repack.planner=none",
        "rollout.engine.simulation.link_gbit_per_s=100",
        "rollout.engine.simulation.scorers=1",
    ),
}


CASE_PARAMS = [
    pytest.param(words, id=case, marks=[pytest.mark.slow] * bool(words)) for case, words in CASES.items()
]


@pytest.fixture(scope="module", params=CASE_PARAMS)
def recorded(request, tmp_path_factory):
    done, folder = run_recorded(tmp_path_factory.mktemp("runs"), *request.param)
    return request.param, done, folder


def test_a_record_changes_nothing_of_what_comes_out(recorded):
    settings, done, _ = recorded
    again = run(*settings)
    assert again.rows == done.rows
    assert again.figures == done.figures


def test_the_audit_holds_on_a_record_and_says_what_it_leaves_out(recorded):
    proof = prove(recorded[2])
    assert proof.violations == []
    assert any(note.startswith("simulated: nothing was generated") for note in proof.notes)
    assert any(note.startswith("sealed") for note in proof.notes)


def test_the_command_claims_no_more_of_a_simulation_than_was_checked(recorded):
    told = CliRunner().invoke(app, ["audit", str(recorded[2]), "verify"]).stdout
    assert "every law that was checked holds" in told
    assert "every law holds" not in told


def test_rows_summary_and_accounts_of_a_record_are_those_of_the_run(recorded):
    _, done, folder = recorded
    summary = msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary)
    assert list(read_rows(folder / "metrics.jsonl", StepRow)) == done.rows
    assert summary.simulated
    assert summary.steps == len(done.rows)
    assert sum(summary.restarts.values()) >= len(done.failed_s)
    with reading(folder) as connection:
        account = read_accounting(connection).train
    assert account.balanced
    assert account.consumed == sum(row.trajectories for row in done.rows)


def test_times_of_a_record_are_those_of_the_virtual_clock(recorded):
    _, done, folder = recorded
    with reading(folder) as connection:
        rows = list(trajectory_rows(connection, "status = 'consumed'"))
    first_s, last_s = min(row.issued_s for row in rows), max(row.ended_s for row in rows)
    assert -1e-3 < done.rows[-1].rl_s - (last_s - first_s) < 1.0, "but for the way of the first weights"
    assert all(row.issued_s <= row.finished_s <= row.scored_s <= row.ready_s <= row.ended_s for row in rows)
    seconds = [row.rl_s for row in read_rows(folder / "fleet.jsonl", FleetRow)]
    assert np.diff(seconds) == pytest.approx(1.0, abs=0.01)


def test_report_and_page_begin_with_the_word_that_it_was_simulated(recorded):
    report = read_report(recorded[2])
    first, *_ = headline(report)
    assert (first.name, first.note[:21]) == ("simulated", "nothing was generated")
    page = make_page(report)
    assert page.cards[0].name == "simulated"
    assert "20 s of the GPUs" in page.cards[0].note
    assert not page.live


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE piece SET end = end - 1 WHERE trajectory = 2",
        "UPDATE piece SET spans = '[[3,0,' || end || ']]' WHERE trajectory = 2",
        "UPDATE piece SET name = 'hints' WHERE trajectory = 2",
        "UPDATE piece SET segment = 'replica-0' WHERE trajectory = 2",
        "DELETE FROM piece WHERE trajectory = 2",
    ],
)
def test_counts_that_were_changed_are_found(tmp_path, sql):
    _, folder = run_recorded(tmp_path, "steps=2")
    (folder / "seal.json").unlink()
    with sqlite3.connect(folder / LEDGER_NAME) as connection:
        assert connection.execute(sql).rowcount
    assert {(str(one.rule), one.subject) for one in prove(folder).violations} == {("spans", "g0.1")}


def test_no_resume_finds_a_record_and_one_that_names_it_is_refused(tmp_path):
    _, folder = run_recorded(tmp_path, "steps=2")
    _, second = run_recorded(tmp_path, "steps=2")
    assert (folder.name, second.name) == ("simulated-repack-1", "simulated-repack-2")
    assert runs_of(small(f"runs={tmp_path}")) == []
    with pytest.raises(ConfigError, match="is a simulation, which trained no weights; start a new run"):
        refuse_simulated(RunFolder(folder))


@pytest.mark.parametrize("words", [[], ["--record"]])
def test_a_record_is_kept_where_it_is_asked_for(tmp_path, monkeypatch, capsys, words):
    settings = [*SMALL[1:], "steps=2", f"runs={tmp_path / 'new'}"]
    monkeypatch.setattr(sys, "argv", ["laminar", "simulate", str(CONFIG), *settings, "--json", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert json.loads(capsys.readouterr().out)["steps"] == 1
    kept = [path.name for path in tmp_path.glob("new/*")]
    assert kept == (["simulated-repack-1"] if words else [])


def test_a_profile_that_is_not_there_leaves_no_folder(tmp_path, monkeypatch, capsys):
    settings = ["rollout.engine.profile=none.yaml", f"runs={tmp_path / 'new'}"]
    monkeypatch.setattr(sys, "argv", ["laminar", "simulate", str(CONFIG), *settings, "--record"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "rollout.engine.profile=none.yaml: no such file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_control_of_staleness_moves_the_bound_of_a_simulation_within_its_limits_and_on_record(tmp_path):
    tight = ("staleness.max_staleness=1", "staleness.control={max: 3}", "steps=24")
    free = ("rollout.on_new_weights=in_place", "repack.planner=none", "rollout.prompts_per_step=8")
    done, folder = run_recorded(tmp_path, *free, *tight)
    with reading(folder) as connection:
        changes = list(read_events(connection, SettingChanged))
    assert [(one.value, one.by) for one in changes[:1]] == [(2, "control")], "the learner waits for admission"
    assert all(1 <= one.value <= 3 for one in changes)
    assert prove(folder).violations == []
    assert sum(row.waited_s for row in done.rows[-5:]) < sum(row.waited_s for row in done.rows[2:7])
    cards = [card for card in headline(read_report(folder)) if card.name == "changed"]
    assert cards[0].note.startswith("staleness.max_staleness=2 by control, since the learner waits")
    assert "staleness.max_staleness=2 by control" in CliRunner().invoke(app, ["audit", str(folder)]).stdout
    assert make_page(read_report(folder)).cards
