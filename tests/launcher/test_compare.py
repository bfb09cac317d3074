"""Curves of runs, and runs side by side."""

import io
import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from laminar_lab.commands.compare import app
from laminar_lab.compare import (
    ComparedRun,
    Comparison,
    SeedGroup,
    change_lines,
    compare,
    seed_warning,
    sets_table,
)
from laminar_lab.curves import (
    FleetSizes,
    Point,
    count_devices,
    device_seconds,
    read_curves,
    read_fleet_sizes,
    read_problem_rewards,
)
from laminar_py.cli import console
from laminar_py.config.loading import dump_config, load_config
from laminar_py.config.section import ConfigError
from laminar_py.records.evaluations import set_figures
from laminar_py.records.metrics import FleetRow
from tests.builders import make_answers, make_evaluated
from tests.ledger.runs import begin, open_ledger
from tests.report.builders import make_fleet_row, make_step_row, write_rows
from tests.report.ledgers import write_small_run
from tests.runs.runs import REPO

QUICKSTART = load_config(REPO / "configs/quickstart.yaml", [])


def make_run(rl_s, devices, *accuracy, rewards=(), config=QUICKSTART, **sets):
    """A run of so many replicas with a curve: pairs of seconds and value; of further sets too."""

    def curve(pairs):
        return [
            Point(step=step, rl_s=at, tokens=round(100 * at), device_hours=at * devices / 3600, value=value)
            for step, (at, value) in enumerate(pairs)
        ]

    by_set = {"first": curve(accuracy)} | {name: curve(pairs) for name, pairs in sets.items()}
    report = SimpleNamespace(rl_s=rl_s)
    run = ComparedRun(report=report, config=config, by_set=by_set, reward=curve(rewards))
    run.__dict__["device_hours"] = rl_s * devices / 3600
    return run


def test_runs_that_differ_in_their_seeds_stand_together_with_every_set_at_equal_device_hours():
    def made(rl_s, *settings, hard):
        config = load_config(REPO / "configs/quickstart.yaml", ["tracking.kinds=[]", *settings])
        return make_run(rl_s, 1, (0.0, 0.1), (rl_s, 0.9), config=config, hard=hard)

    other, *seeds = (
        made(7200.0, "learner.lr=1e-5", "seed=1", hard=[(3600.0, 0.8)]),
        made(3600.0, "seed=1", "name=a", "warm_start.cache=one", hard=[(0.0, 0.2), (3600.0, 0.4)]),
        made(7200.0, "seed=2", "name=b", "warm_start.cache=two", hard=[(0.0, 0.2), (3600.0, 0.6), (7200.0, 0.9)]),
    )
    found = compare([seeds[0], other, seeds[1]])
    assert found.device_hours == 1.0
    assert [group.runs for group in found.groups] == [(0, 2), (1,)]
    assert found.groups[0].at_end == {"first": (0.9, 0.9), "hard": (0.4, 0.9)}
    assert found.groups[0].at_equal == {"first": (0.9, 0.5), "hard": (0.4, 0.6)}, "on the line between evaluations"
    assert found.groups[1].at_equal == {"first": (0.5,), "hard": (0.8,)}


def test_a_run_that_a_user_changed_is_named_and_no_seed_of_the_others():
    configs = [load_config(REPO / "configs/quickstart.yaml", [f"seed={seed}"]) for seed in range(3)]
    runs = [make_run(3600.0, 1, (0.0, 0.1), (3600.0, 0.9), config=config) for config in configs]
    assert [group.runs for group in compare(runs).groups] == [(0, 1, 2)]
    runs[1] = replace(runs[1], changes=("staleness.max_staleness=2 after step 40",))
    assert [group.runs for group in compare(runs).groups] == [(0, 2), (1,)]
    (line,) = change_lines(runs, ["a", "b", "c"])
    assert "b, staleness.max_staleness=2 after step 40" in str(line)


@pytest.mark.parametrize(
    ("results", "axis"),
    [([(0.1, 0.2), (0.9,)], "0 1"), ([(3.0, 5.0), (4.0,)], "0 5"), ([(-2.0, -1.0), (-1.0,)], "-2 0")],
)
def test_the_axis_of_the_sets_begins_at_0_and_a_single_seed_is_named(results, axis):
    groups = tuple(SeedGroup((0, 1)[: len(values)], {"first": values}, {"first": ()}) for values in results)
    comparison = Comparison(measure="reward", reached=(), device_hours=1.0, groups=groups, pairs=())
    console = Console(width=120, file=io.StringIO())
    console.print(sets_table(comparison, ["twice", "once"], width=120))
    head, twice, once = console.file.getvalue().splitlines()[-3:]
    assert " ".join(head.split()) == f"runs seeds first {axis} first at 1 device-hours"
    assert "±" in twice
    assert "one seed" in once
    assert str(seed_warning(comparison, ["twice", "once"])).startswith("ONE SEED: once ran once, so ")


def test_without_an_evaluation_seeds_are_compared_by_the_reward():
    seeds = [QUICKSTART.model_copy(update={"seed": seed}) for seed in (0, 1)]
    runs = [
        make_run(9.0, 1, rewards=((1.0, 0.1), (9.0, end)), config=seed)
        for end, seed in zip((0.7, 0.8), seeds, strict=True)
    ]
    for run in runs:
        run.by_set.clear()
    assert len(compare([runs[0], runs[0]]).groups) == 2, "one seed twice is no second seed"
    (group,) = compare(runs).groups
    assert group.at_end == group.at_equal == {"reward in training": (0.7, 0.8)}


def test_levels_lie_between_the_best_start_and_the_worst_end_and_count_when_first_reached():
    slow = make_run(100.0, 4, (0.0, 0.2), (50.0, 0.5), (100.0, 0.6))
    fast = make_run(80.0, 4, (0.0, 0.1), (20.0, 0.6), (80.0, 0.9))
    found = compare([slow, fast])
    assert found.measure == "accuracy"
    assert [reached.level for reached in found.reached] == pytest.approx([0.3, 0.4, 0.5, 0.6])
    assert [[point.rl_s for point in reached.points] for reached in found.reached] == [
        [50.0, 20.0],
        [50.0, 20.0],
        [50.0, 20.0],
        [100.0, 20.0],
    ]


def test_a_level_that_a_first_evaluation_may_have_reached_by_luck_is_left_out():
    runs = [make_run(9.0, 1, (0.0, 0.5), (9.0, 0.9)) for _ in range(2)]
    first = runs[0].evaluated[0]
    figures = make_evaluated(0.5, problems=20).figures
    assert 0.6 < figures.mean.high < 0.8
    runs[0].evaluated[0] = replace(first, figures=figures)
    assert [reached.level for reached in compare(runs).reached] == pytest.approx([0.8, 0.9])


def test_quality_is_compared_at_the_device_hours_that_all_have_had():
    small = make_run(3600.0, 2, (0.0, 0.0), (3600.0, 0.5))
    large = make_run(1800.0, 8, (0.0, 0.0), (450.0, 0.3), (900.0, 0.6), (1800.0, 0.9))
    found = compare([small, large])
    assert found.device_hours == 2.0
    assert [group.at_equal["first"] for group in found.groups] == [(0.5,), (0.6,)]


def test_without_two_evaluations_of_each_the_reward_is_compared():
    known = make_run(10.0, 1, (0.0, 0.2), (9.0, 0.8), rewards=((1.0, 0.1), (9.0, 0.7)))
    other = make_run(10.0, 1, (0.0, 0.2), rewards=((1.0, 0.1), (9.0, 0.5)))
    found = compare([known, other])
    assert found.measure == "reward"
    assert found.reached[-1].level == 0.5


def test_a_run_that_never_rises_above_the_others_start_has_no_common_level():
    high, low = (make_run(9.0, 1, (0.0, start), (9.0, start + 0.1)) for start in (0.5, 0.1))
    assert compare([high, low]).reached == ()


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        ("configs/quickstart", [], (3, "process")),
        (
            "configs/emulation/repack",
            ["rollout.engine.learner_devices=4", "rollout.replicas=3"],
            (7, "emulated GPU"),
        ),
        ("experiments/math_long_cot/7b_8gpu", ["rollout.replicas=1", "learner.world_size=6"], (8, "GPU")),
    ],
)
def test_devices_are_those_of_replicas_and_learner(config, settings, expected):
    assert count_devices(load_config(REPO / f"{config}.yaml", settings)) == expected


def row(rl_s, running):
    """A sample of these replicas, by number."""
    none = [0] * len(running)
    kv = [0.5] * len(running)
    rest = {"versions": none, "waiting": none, "generated_tokens": 0, "kv_s": 0.0, "kv_use": kv}
    return FleetRow(rl_s=rl_s, replicas=list(running), running=list(running.values()), **rest)


def test_device_hours_count_each_replica_as_long_as_it_was_there(tmp_path):
    rows = [row(1.0, {0: 1, 1: 1}), row(2.0, {0: 1, 1: 1}), row(10.0, dict.fromkeys(range(6), 1))]
    write_rows(tmp_path / "fleet.jsonl", rows)
    sizes = read_fleet_sizes(tmp_path)
    assert sizes == FleetSizes((1.0, 10.0), (2, 6), (0, 0))
    assert [sizes.replica_seconds(at_s) for at_s in (5.0, 10.0, 12.0)] == [10.0, 20.0, 32.0]
    config = load_config(REPO / "configs/emulation/repack.yaml", ["rollout.replicas=6"])
    learner = count_devices(config)[0] - 6
    assert device_seconds(config, sizes, 12.0) == pytest.approx(32.0 + 12.0 * learner)
    assert device_seconds(config, FleetSizes(), 12.0) == pytest.approx(12.0 * (6 + learner))


def test_device_hours_count_each_rank_as_long_as_it_was_there(tmp_path):
    rows = [row(1.0, {0: 1, 1: 1}), row(4.0, {0: 1, 1: 1}), row(10.0, {0: 1})]
    write_rows(
        tmp_path / "fleet.jsonl",
        [msgspec.structs.replace(one, ranks=n) for one, n in zip(rows, (0, 3, 3), strict=True)],
    )
    config = load_config(REPO / "configs/quickstart.yaml", ["rollout.replicas=1"])
    assert device_seconds(config, read_fleet_sizes(tmp_path), 12.0) == 2 * 10 + 2 + 4 + 3 * 8


async def test_a_curve_has_each_set_with_its_costs_in_the_order_of_time(tmp_path):
    config = load_config(
        REPO / "configs/quickstart.yaml",
        ["eval.sets={easy: easy.jsonl, hard: hard.jsonl, rare: rare.jsonl}", "rollout.replicas=3"],
    )
    (tmp_path / "config.yaml").write_text(dump_config(config))
    write_rows(tmp_path / "metrics.jsonl", [make_step_row(1, 10.0, trained_tokens=1_000)])
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        for index, (name, mean, rl_s) in enumerate(
            [("hard", 0.25, 0.0), ("easy", 0.5, 0.0), ("easy", 1.0, 10.0), ("easy", 0.75, 5.0)]
        ):
            ledger.append(make_evaluated(mean, rl_s=rl_s, set_name=name, index=index))
    curves = read_curves(tmp_path)
    assert list(curves) == ["easy", "hard"]
    easy = curves["easy"]
    assert [(point.rl_s, point.value, point.tokens) for point in easy] == [
        (0.0, 0.5, 0),
        (5.0, 0.75, 500),
        (10.0, 1.0, 1_000),
    ]
    assert easy[2].device_hours == pytest.approx(10.0 * (3 + 1) / 3600)
    assert easy[0].figures.mean.low < 0.5 < easy[0].figures.mean.high
    assert {k: one.value for k, one in easy[0].figures.pass_at.items()} == {1: 0.5}


@pytest.fixture
async def run(tmp_path):
    folder = tmp_path / "small-1"
    folder.mkdir()
    await write_small_run(folder)
    shutil.copy(REPO / "configs/quickstart.yaml", folder / "config.yaml")
    rows = [make_step_row(step, float(step), reward=0.25 * step, trained_tokens=10 * step) for step in (1, 2, 3)]
    write_rows(folder / "metrics.jsonl", rows)
    write_rows(folder / "fleet.jsonl", [make_fleet_row(float(at), [4, 4], [0.5, 0.5]) for at in (1, 2, 3)])
    return folder


def invoke(*arguments, columns=120):
    before, console.width = console.width, columns
    try:
        return CliRunner(env={"COLUMNS": str(columns)}).invoke(
            app, list(map(str, arguments)), catch_exceptions=False
        )
    finally:
        console.width = before


async def test_runs_stand_side_by_side(run):
    other = shutil.copytree(run, run.with_name("small-2"))
    with (other / "config.yaml").open("a") as file:
        file.write("max_rl_seconds: 77.0\n")
    output = invoke(run, other).stdout
    titles = (
        "What differs in the configs",
        "max_rl_seconds",
        "ONE SEED: each config ran once",
        "small-1 and small-2, by reward",
        "one seed cannot tell",
        "heldout: the last evaluation",
        "Speed and tails",
    )
    places = [output.index(title) for title in titles]
    assert places == sorted(places), "first the configs, then verdicts, then the held-out set, then speed"
    assert re.search(r"^max_rl_seconds +null +77\.0 *$", output, re.MULTILINE)
    assert len(re.findall(r"^accuracy .*0\.500 \(0\.\d+ to", output, re.MULTILINE)) == 1
    assert invoke(run, run).stdout.startswith("The configs agree in all settings.")
    for words in ("goodput, useful tokens/s", "small-2", "(1.00x)", "Until reward is"):
        assert words in output
    assert json.loads(invoke(run, run, "--json").stdout)["measure"] == "reward"
    assert read_problem_rewards(run) == {"e0-heldout": {0: 1.0, 1: 0.0}}
    with pytest.raises(ConfigError, match=r"cannot be written \(No such file"):
        invoke(run, other, "--html", run / "none" / "page.html")
    with pytest.raises(ConfigError, match="one run cannot be compared"):
        invoke(run)


async def test_five_runs_fit_80_columns_and_no_value_is_lost(run):
    others = [shutil.copytree(run, run.with_name(f"another-long-name-{place}")) for place in range(4)]
    lines = invoke(run, *others, columns=80).stdout.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert sum(line.startswith("goodput, useful tokens/s ") for line in lines) > 1, "in parts, each with its names"
    goodput = [word for line in lines if line.startswith("goodput") for word in re.findall(r"\(1\.00x\)", line)]
    assert len(goodput) == len(others), "all but the first run have a ratio"
    assert not any("…" in line for line in lines)


async def test_runs_that_differ_in_their_seeds_are_one_row_of_sets(run):
    other = shutil.copytree(run, run.with_name("small-2"))
    with (other / "config.yaml").open("a") as file:
        file.write("seed: 7\n")
    output = invoke(run, other).stdout
    assert "ONE SEED" not in output
    assert re.search(r"small-1 \+1 +2 +0\.500 ± 0\.000 +·{9}●·{9} +0\.500 ± 0\.000 +$", output, re.MULTILINE)
    (group,) = json.loads(invoke(run, other, "--json").stdout)["groups"]
    assert (group["runs"], list(group["at_equal"].values())) == ([0, 1], [[0.5, 0.5]])


@pytest.fixture
async def evaluations(tmp_path):
    """Two evaluations by `laminar eval`, of which none trained: a base model and a checkpoint."""
    folders = []
    sources = ({"path": "models/base", "step": 0}, {"path": "runs/m-1/checkpoints/step-40-1.0", "step": 40})
    for number, (source, right) in enumerate(zip(sources, (0.25, 0.75), strict=True), 1):
        folder = tmp_path / f"eval-m-{number}"
        folder.mkdir()
        shutil.copy(REPO / "configs/quickstart.yaml", folder / "config.yaml")
        (folder / "source.json").write_text(json.dumps(source))
        async with open_ledger(folder) as ledger:
            begin(ledger)
            terms = {"math": [[float(at < 8 * right)] for at in range(8)], "short": [[1.0]] * 8}
            rewards = [[math[0] + 1.0] for math in terms["math"]]
            figures = set_figures(make_answers(rewards, terms=terms), samples=1, verdicts=["math"])
            ledger.append(msgspec.structs.replace(make_evaluated(step=source["step"]), figures=figures))
        folders.append(folder)
    return folders


async def test_evaluations_are_compared_with_the_model_that_each_was_of(evaluations, run):
    """They have no training trajectory: the user read "no trajectory has finished yet"."""
    output = invoke(*evaluations).stdout
    assert "eval-m-1: models/base\neval-m-2: runs/m-1/checkpoints/step-40-1.0, step 40\n" in output
    interval = r"\(\d\.\d{3} to \d\.\d{3}\)"
    for name, values in {"mean reward": (1.25, 1.75), "math accuracy": (0.25, 0.75), "short": (1.0, 1.0)}.items():
        first, second = (f"{value:.3f}".replace(".", r"\.") for value in values)
        assert re.search(rf"^{name} +{first} {interval} +{second} {interval} *$", output, re.MULTILINE), name
    (first, second) = json.loads(invoke(*evaluations, "--json").stdout)
    assert (first["model"]["path"], second["sets"]["heldout"]["mean"]["value"]) == ("models/base", 1.75)
    with pytest.raises(ConfigError, match=r"eval-m-1: is an evaluation and .*small-1 is not; compare"):
        invoke(evaluations[0], run)
