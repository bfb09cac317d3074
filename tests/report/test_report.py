"""`laminar report` on small folders, and on folders that are no run."""

import json
import shutil
from io import StringIO

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from laminar_lab.report.closing import closing_table, ending_table
from laminar_lab.report.diagnosis import NO_STEP
from laminar_lab.report.figures import headline
from laminar_lab.report.gains import describe_main_term, warn_of_bonus
from laminar_lab.report.run_report import RunReport, read_report
from laminar_lab.report.snapshot import read_samples, read_snapshot
from laminar_lab.report.tails import NAMES, Distribution, Measure
from laminar_lab.report.terminal import tail_table
from laminar_lab.report.tokens import waterfall
from laminar_py.cli import app
from laminar_py.config.loading import load_config
from laminar_py.observe.summary import EvaluationFigures
from laminar_py.records.evaluations import set_figures
from laminar_py.records.events import RefillStopped, RunEnded
from tests.builders import make_answers, make_evaluated
from tests.ledger.runs import open_ledger
from tests.report.builders import make_fleet_row, make_step_row, shown, summary_of, write_rows
from tests.report.ledgers import live, write_small_run
from tests.runs.runs import REPO

STEPS = [
    make_step_row(step, rl_s, reward=reward, generated_tokens=generated, trained_tokens=trained)
    for step, rl_s, reward, generated, trained in (
        (1, 1.0, 0.25, 50, 30),
        (2, 2.0, 0.5, 60, 35),
        (2, 2.5, 0.5, 80, 35),
        (3, 4.0, 0.75, 98, 42),
    )
]
FLEET = [make_fleet_row(float(at), [4, 4], [0.5, 0.5]) for at in (1, 2, 3)]


@pytest.fixture
async def run(tmp_path):
    """A run that was killed: no summary, and half a line at the end."""
    folder = tmp_path / "small-1"
    folder.mkdir()
    await write_small_run(folder)
    shutil.copy(REPO / "configs/quickstart.yaml", folder / "config.yaml")
    write_rows(folder / "metrics.jsonl", STEPS)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rl')
    write_rows(folder / "fleet.jsonl", FLEET)
    return folder


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["report", *map(str, arguments)], catch_exceptions=False)


async def test_the_report_says_what_refill_found_where_it_could_not_fill_a_step(run):
    async with open_ledger(run) as ledger:
        ledger.append(
            RefillStopped(step=4, num_wanted=8, num_taken=2, num_without_signal=30, num_best=24, num_worst=3)
        )
    told = " ".join(invoke(run).output.split())
    assert (
        "steps that refill could not fill: 1, at last step 4 with 2 of 8 groups; 30 others had no signal" in told
    )
    assert "80% are solved (all rewards the best of the run), 10% hopeless (the worst)" in told


async def test_half_a_line_counts_for_nothing_and_a_step_counts_as_last_done(run):
    found = read_samples(run)
    assert [(row.step, row.generated_tokens) for row in found.steps] == [(1, 50), (2, 80), (3, 98)]
    assert found.rl_s == 4.0
    assert [row.running for row in found.fleet] == [[4, 4]] * 3
    (run / "summary.json").write_text('{"rl_seconds": 5.5, "finished": true}')
    assert read_samples(run).rl_s == 5.5


async def test_a_report_says_where_tokens_and_time_went(run):
    done = invoke(run)
    assert done.exit_code == 0
    for words in (
        "useful in 4.0 s of RL",
        "What limits it",
        "no signal: all wrong",
        "step skipped",
        "group deadline",
        f"what to change first: laminar advise {run}",
    ):
        assert words in done.stdout
    tails = done.stdout.split("\nTails\n")[1].split("in pictures")[0].splitlines()
    assert all(line.startswith(("    ", *NAMES.values(), "  of it,")) for line in tails), "no cell is wrapped"
    assert "\N{HORIZONTAL ELLIPSIS}" not in done.stdout, "tables fit the terminal"


def test_long_responses_are_told_in_digits():
    of_length = Distribution(
        count=3, mean=12_345.6, p50=12_345.6, p90=16_384.0, p95=16_384.0, p99=16_384.0, max=16_384.0
    )
    console = Console(width=80, file=StringIO())
    console.print(tail_table({Measure.LENGTH: of_length}))
    assert "12,346  16,384" in console.file.getvalue()


async def test_what_a_crash_tore_counts_for_nothing_and_another_form_is_named(run):
    lines = [
        msgspec.json.encode(row).decode() + "\n" for row in (FLEET[0], make_fleet_row(7.0, [4, 4], [0.5, 0.5]))
    ]
    with (run / "fleet.jsonl").open("a") as file:
        file.write('{"rl_s": 3.5, "run' + "".join(lines))
    assert read_samples(run).rl_s == 7.0
    (run / "metrics.jsonl").write_text('{"step": "one", "rl_s": 1.0}\n')
    with pytest.raises(
        ValueError, match=r"metrics.jsonl: line 1: Expected `int`.*; use the release that wrote it$"
    ):
        read_samples(run)


async def test_a_run_ends_with_its_gain_its_limit_and_the_next_command(run):
    figures = [
        EvaluationFigures(set_name="heldout", step=3, version=3, rl_s=3.0, figures=make_evaluated(share).figures)
        for share in (0.25, 0.75)
    ]
    summary = msgspec.structs.replace(summary_of(run), evaluations=figures)
    lines = shown(ending_table(summary, read_report(run), interrupted=False))
    assert list(lines) == ["heldout accuracy", "RL", "limited by", "change first", "next"]
    assert lines["heldout accuracy"].startswith("0.250 -> 0.750 (")
    assert lines["limited by"].endswith(" x the goodput")
    assert "heldout accuracy" not in shown(ending_table(summary, read_report(run), interrupted=True))


def make_bonus(right, short):
    """An evaluation of 20 problems, whose reward is `math` and a tenth of `short`, by the numbers of successes."""
    terms = {
        "math": [[float(at < right)] for at in range(20)],
        "rewards.py:short": [[float(at < short)] for at in range(20)],
    }
    rewards = [[math[0] + 0.1 * bonus[0]] for math, bonus in zip(*terms.values(), strict=True)]
    return set_figures(make_answers(rewards, terms=terms), samples=1, verdicts=["math"])


async def test_a_gain_that_a_bonus_made_is_told_beside_the_term_that_counts(run):
    """The user's `heldout mean reward 0.362 -> 0.435` was `score` 0.340 -> 0.355 and `short` 0.225 -> 0.800."""
    config = load_config(
        REPO / "configs/quickstart.yaml",
        ["reward.use=[math, {kind: function, path: rewards.py:short, weight: 0.1}]"],
    )
    before, gamed, better = make_bonus(7, 4), make_bonus(7, 16), make_bonus(14, 5)
    assert describe_main_term(before, gamed) == "math 0.350 -> 0.350"
    assert warn_of_bonus(before, gamed, config) == (
        "most of the gain of 0.060 is not from math: short 0.200 -> 0.800, math 0.350 -> 0.350"
    )
    assert warn_of_bonus(before, better, config) == warn_of_bonus(gamed, before, config) == ""
    one = make_evaluated(0.5).figures
    assert describe_main_term(one, one) == warn_of_bonus(one, one, config) == ""
    passes = [
        EvaluationFigures(set_name="heldout", step=step, version=step, rl_s=3.0, figures=figures)
        for step, figures in ((0, before), (3, gamed))
    ]
    summary = msgspec.structs.replace(summary_of(run), evaluations=passes)
    for lines in (
        shown(ending_table(summary, read_report(run), interrupted=False)),
        shown(closing_table(summary)),
    ):
        assert lines["heldout mean reward"].endswith("; math 0.350 -> 0.350")
        assert lines["careful"].startswith("heldout: most of the gain of 0.060 is not from math")
    async with open_ledger(run) as ledger:
        for place, (step, figures) in enumerate(((0, before), (3, gamed)), 1):
            made = make_evaluated(step=step, rl_s=float(place), index=place, set_name="sum")
            ledger.append(msgspec.structs.replace(made, figures=figures))
    (card,) = (card for card in headline(read_report(run)) if card.name == "sum: mean reward")
    assert "math 0.350 -> 0.350; most of the gain" in card.note


@pytest.mark.parametrize(("reason", "word"), [("finished", "never trained"), ("interrupted", "still live")])
async def test_what_a_finished_run_left_was_never_trained_and_a_stopped_run_may_go_on(run, reason, word):
    async with open_ledger(run) as ledger:
        ledger.append(RunEnded(1, reason))
    assert f"- {word}" in [row.name for row in waterfall(read_report(run).tokens)]


async def test_a_run_without_a_whole_step_ends_with_words_too(run):
    (run / "sub").mkdir()
    async with open_ledger(run / "sub") as ledger:
        live(ledger, "g0.0", 3)
    shutil.copy(run / "config.yaml", run / "sub")
    report = RunReport(read_snapshot(run / "sub"))
    lines = shown(ending_table(summary_of(run), report, interrupted=True))
    assert lines["limited by"] == NO_STEP


async def test_one_object_of_json_has_all_of_it_and_what_is_derived(run):
    found = json.loads(invoke(run, "--json").stdout)
    assert (found["steps"], found["tokens"]["goodput"], found["trained_tokens_per_s"]) == (3, 6.25, 10.5)
    assert found["tails"]["length"]["tail"] > 1
    assert found["staleness"] == {"mean": 0.75, "max": 2, "counts": {"0": 2, "1": 1, "2": 1}}


async def test_a_run_that_goes_on_is_reported_too(run):
    async with open_ledger(run) as ledger:
        live(ledger, "g20.0", 30)
        await ledger.commit()
        assert read_report(run).tokens.issued == 133


async def test_what_is_no_run_or_has_nothing_yet_is_told_in_one_line(tmp_path, run):
    empty = tmp_path / "empty-1"
    empty.mkdir()
    shutil.copy(REPO / "configs/quickstart.yaml", empty / "config.yaml")
    with pytest.raises(ValueError, match=r"^ledger=.*empty-1/ledger.sqlite: no such file; name the folder"):
        invoke(empty)
    async with open_ledger(empty):
        pass
    with pytest.raises(ValueError, match=r"^run=.*empty-1: no trajectory has finished yet"):
        invoke(empty)
    with pytest.raises(ValueError, match=r"^run=.*ledger.sqlite: is a file; name the folder of a run"):
        invoke(run / "ledger.sqlite")
    (run / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"^config=.*config.yaml: no such file"):
        invoke(run)
