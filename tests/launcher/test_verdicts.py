"""Which config is better at a budget: differences over seeds and problems, words, confounders, the page."""

import json

import numpy as np
import pytest

from laminar_lab.compare import compare, group_names, verdict_lines
from laminar_lab.compare_page import render_comparison
from laminar_lab.curves import Point
from laminar_lab.verdicts import (
    AXES,
    BudgetVerdict,
    Result,
    SeedCurve,
    band,
    difference,
    find_confounders,
    result_at,
    value_at,
)
from laminar_py.config.loading import load_config
from tests.launcher.test_compare import QUICKSTART, make_run
from tests.report.browser import browsing, needs_browser
from tests.runs.runs import REPO

SECONDS, TOKENS, DEVICE_HOURS = AXES
TRIALS, PROBLEMS = 1_000, 40


def configured(*overrides):
    return load_config(REPO / "configs/quickstart.yaml", list(overrides))


def curve(*pairs):
    return [
        Point(step=0, rl_s=at, tokens=round(at), device_hours=at / 3600, value=value, pass_id=f"e{place}")
        for place, (at, value) in enumerate(pairs)
    ]


def simulate(draws, *, seeds=((0, 1, 2), (0, 1, 2)), better=0.0, seed_sd=0.3, shared_sd=0.3, interaction=0.0):
    """Results of two configs on problems that are drawn too; `better` is the first one's lead, in logits."""
    difficulty, shared = draws.normal(0, 1.0, PROBLEMS), draws.normal(0, shared_sd, 8)
    found = []
    for place, own in enumerate(seeds):
        of_config = difficulty + interaction * draws.normal(size=PROBLEMS) + (better if place == 0 else 0.0)
        chances = [1 / (1 + np.exp(-of_config - shared[it] - draws.normal(0, seed_sd))) for it in own]
        answers = {it: draws.binomial(8, chance) / 8 for it, chance in zip(own, chances, strict=True)}
        found.append({it: Result(mean.mean(), dict(enumerate(mean))) for it, mean in answers.items()})
    return found


def share_certain(**settings):
    """Share of trials in which one of the two configs is called better."""
    draws, certain = np.random.default_rng(7), 0
    for _ in range(TRIALS):
        found = difference(*simulate(draws, **settings))
        certain += not found.low <= 0.0 <= found.high
    return certain / TRIALS


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="pairs"),
        pytest.param({"seeds": ((0, 1, 2), (3, 4, 5))}, id="other-seeds"),
        pytest.param({"seeds": ((0, 1, 2), (3, 4))}, id="three-and-two"),
        pytest.param({"seed_sd": 0.02, "shared_sd": 0.0, "interaction": 0.7}, id="problems-decide"),
    ],
)
def test_three_seeds_of_equal_configs_are_hardly_ever_told_apart(settings):
    """A bootstrap over seeds calls one of them better in 18 to 45 % of the trials."""
    assert share_certain(**settings) <= 0.07


def test_a_large_difference_is_found_by_three_seeds():
    assert share_certain(better=1.5, seed_sd=0.1) >= 0.95


def test_rewards_without_problems_have_the_interval_of_student():
    first = {seed: Result(value, {}) for seed, value in enumerate((0.5, 0.6, 0.7))}
    second = {seed: Result(0.1, {}) for seed in range(3)}
    found = difference(first, second)
    assert (found.value, found.pairs) == (pytest.approx(0.5), 3)
    half = pytest.approx(4.303 * 0.1 / 3**0.5)
    assert (found.high - found.value, found.value - found.low) == (half, half)
    others = {seed + 5: result for seed, result in second.items()}
    assert difference(first, others).pairs == 0
    assert difference(first, others).high == pytest.approx(found.high), "Welch: all spread is in one sample"
    assert difference(first, {0: second[0]}) is None
    partly = {0: second[0], 1: second[1], 9: second[2]}
    assert difference(first, partly).pairs == 0, "two common seeds of three are too few for pairs"
    assert difference(first, {**second, 9: second[0]}).pairs == 3


def test_equal_seeds_with_other_problems_right_cannot_tell():
    """The spread over seeds is 0 here: the problems alone say how much is luck."""
    ours = {seed: Result(0.6, {it: float(it < 6) for it in range(10)}) for seed in range(3)}
    theirs = {seed: Result(0.5, {it: float(it >= 5) for it in range(10)}) for seed in range(3)}
    found = difference(ours, theirs)
    assert found.low < 0.0 < found.value < found.high


def test_a_value_lies_on_the_line_between_evaluations():
    points = curve((10.0, 0.2), (20.0, 0.4), (40.0, 0.4))
    assert value_at(points, SECONDS, 5.0) is None
    found = [value_at(points, SECONDS, budget) for budget in (10.0, 15.0, 40.0, 50.0)]
    assert found == pytest.approx([0.2, 0.3, 0.4, 0.4])
    answers = {"e0": {0: 0.0, 1: 0.4, 7: 1.0}, "e1": {0: 0.4, 1: 0.4}}
    found = result_at(SeedCurve(points, answers), SECONDS, 15.0)
    assert found.problems == pytest.approx({0: 0.2, 1: 0.4})


def runs_of(rates, *, devices=(1, 1), seeds=3, **settings):
    """Three runs each of two algorithms, whose accuracy after 60 s is `rates`, more by 0.01 with each seed."""
    configs = [
        configured(f"seed={seed}", f"algorithm.name={name}")
        for name in ("grpo", "reinforce_pp")
        for seed in range(seeds)
    ]
    ends = [rate + 0.01 * (seed % 2) for rate in rates for seed in range(seeds)]
    used = [count for count in devices for _ in range(seeds)]
    runs = [
        make_run(60.0, count, (0.0, 0.1), (60.0, end), rewards=((0.0, 0.0), (60.0, end)), config=config)
        for config, end, count in zip(configs, ends, used, strict=True)
    ]
    for place, run in enumerate(runs):
        run.report.run, run.report.simulation = f"runs/{run.config.algorithm.name}-{place % seeds + 1}", ""
    return runs


def lines_of(runs):
    found = compare(runs)
    return [str(line).strip() for line in verdict_lines(found, group_names(runs, found))]


def test_a_verdict_names_the_better_config_at_each_budget():
    title, *lines = lines_of(runs_of((0.5, 0.9)))
    assert title == "grpo-1 +2 and reinforce_pp-1 +2, by accuracy"
    assert [line.partition(": ")[0] for line in lines] == [
        "at 30 s",
        "at 60 s",
        "at 3,000 tokens",
        "at 6,000 tokens",
    ]
    assert lines[1] == (
        "at 60 s: grpo-1 +2 0.503 ± 0.014, reinforce_pp-1 +2 0.903 ± 0.014:"
        " reinforce_pp-1 +2 is better by 0.400 (0.400 to 0.400, 3 pairs of seeds)"
    )


def test_device_hours_have_verdicts_where_runs_spend_them_at_different_rates():
    runs = runs_of((0.5, 0.5), devices=(1, 4))
    assert [line.partition(":")[0] for line in lines_of(runs)[5:]] == [
        "at 0.00833 device-hours",
        "at 0.0167 device-hours",
    ]
    assert lines_of(runs)[-1].endswith(
        "grpo-1 +2 0.503 ± 0.014, reinforce_pp-1 +2 0.201 ± 0.004: "
        "grpo-1 +2 is better by 0.302 (0.292 to 0.313, 3 pairs of seeds)"
    )


def test_seeds_that_cannot_tell_are_said_to():
    results = [
        {seed: Result(value, {}) for seed, value in enumerate(values)} for values in ((0.5, 0.7), (0.6, 0.65))
    ]
    values = ((0.5, 0.7), (0.6, 0.65))
    verdict = BudgetVerdict(budget="60 s", values=values, difference=difference(*results))
    assert verdict.better is None
    assert verdict.describe("ab").startswith(
        "at 60 s: a 0.600 ± 1.271, b 0.625 ± 0.318: 2 pairs of seeds cannot tell"
    )
    alone = BudgetVerdict(budget="60 s", values=((0.5,), (0.6,)), difference=None)
    assert alone.describe("ab") == "at 60 s: a 0.500, b 0.600: one seed cannot tell; run three or more of each"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.name=reinforce_pp", "seed=3", "name=other"], {}),
        (["rollout.replicas=5"], {}),
        (["eval.every_steps=7"], {"evaluation": ("eval.every_steps",)}),
        (["learner.lr=1e-5", "learner.grad_clip=0.5"], {}),
        (
            ["learner.lr=1e-5", "rollout.replicas=5"],
            {"devices": ("rollout.replicas",), "optimizer": ("learner.lr",)},
        ),
        (
            ["learner.lr=1e-5", "learner.publish_every=2", "algorithm.kl_coef=0.25", "schedule=one_step"],
            {
                "algorithm": ("algorithm.kl_coef",),
                "staleness and replay": ("learner.publish_every",),
                "schedule": ("schedule",),
                "optimizer": ("learner.lr",),
            },
        ),
        (
            ["rollout.group_size=16", "rollout.sampling.temperature=0.7", "reward.workers=2"],
            {
                "devices": ("reward.workers",),
                "sampling": ("rollout.sampling.temperature",),
                "batch": ("rollout.group_size",),
            },
        ),
    ],
)
def test_confounders_are_settings_of_the_costs_that_differ_beside_the_one_under_study(overrides, expected):
    assert find_confounders(QUICKSTART, configured(*overrides)) == expected


def test_a_band_is_where_all_seeds_have_values():
    seeds = {0: SeedCurve(curve((0.0, 0.0), (10.0, 1.0)), {}), 1: SeedCurve(curve((2.0, 0.2), (20.0, 0.2)), {})}
    found = band(seeds, SECONDS, points=3)
    assert found.x == [2.0, 6.0, 10.0]
    assert found.mean == pytest.approx([0.2, 0.4, 0.6])
    assert found.high[1] - found.mean[1] == pytest.approx(12.706 * 0.2)
    assert band({0: SeedCurve([], {})}, SECONDS, points=3).x == []


@needs_browser
async def test_the_page_draws_bands_over_seconds_tokens_and_device_hours(tmp_path):
    runs = runs_of((0.5, 0.9))
    page = tmp_path / "compared.html"
    page.write_text(render_comparison(runs, compare(runs)))
    async with browsing(tmp_path / "profile") as tab:
        await tab.open(page.as_uri())
        await tab.until("document.querySelectorAll('#curves-1 .js-line').length >= 6")
        bands = "[0, 1].map((at) => document.querySelectorAll(`#curves-${at} .js-fill`).length)"
        assert json.loads(await tab.look(f"JSON.stringify({bands})")) == [6, 6]
        assert "is better by 0.400" in await tab.look("document.getElementById('pair-0-1').textContent")
        assert await tab.look("document.getElementById('state').textContent") == "means and bands over seeds"
