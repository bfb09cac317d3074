"""Findings on how a run learns: each is named with its figure and remedy, and a sound run has none."""

import numpy as np
import pytest

from laminar_lab.report.learning import learning_findings
from laminar_lab.report.trajectories import CAPS, KINDS
from laminar_py.config.loading import load_config
from laminar_py.records.trajectory import Cap, Kind
from tests.report.builders import make_step_row, make_trajectories
from tests.report.scripted import CONFIG

TOOLS = "environment={kind: tools, tools: {use: [calculator], family: tags}}"
COUNT, SIZE = 256, 8


def found(*overrides, steps=(), cut=0.0, evaluated_cut=0.0, rewards=None, turns=-1):
    """Findings on a run of 32 training groups of 8, and on an evaluation of 256 problems."""
    rng = np.random.default_rng(0)
    kinds = [KINDS.index(kind) for kind in (Kind.TRAIN, Kind.EVAL) for _ in range(COUNT)]
    shares = np.repeat([cut, evaluated_cut], COUNT)
    columns = {
        "kind": kinds,
        "group": np.concatenate([np.arange(COUNT) // SIZE, COUNT + np.arange(COUNT)]),
        "cap": np.where(rng.random(2 * COUNT) < shares, CAPS.index(Cap.TOKENS), -1),
        "reward": rng.integers(0, 2, 2 * COUNT) if rewards is None else np.tile(rewards, 2),
        "turns": turns,
    }
    config = load_config(CONFIG, [f"rollout.group_size={SIZE}", *overrides])
    return [str(finding) for finding in learning_findings(config, make_trajectories(2 * COUNT, **columns), steps)]


def test_a_run_that_learns_has_none():
    row = make_step_row(1, 9.0, trained_tokens=800, learner_s=2.0, learner_tokens_per_s=1000.0)
    assert found(TOOLS, steps=[row], cut=0.05, evaluated_cut=0.02, turns=2) == []


def test_tools_that_no_turn_calls_are_named():
    (line,) = found(TOOLS, turns=1)
    assert line.startswith("no turn of 256 trajectories called a tool: look at a prompt (`laminar data CONFIG`)")
    assert found(turns=1) == []


def test_answers_at_the_cap_are_named():
    (line,) = found("rollout.sampling.max_new_tokens=77", evaluated_cut=0.5)
    assert "of the evaluation's answers were cut by the cap on tokens: rollout.sampling.max_new_tokens=77" in line
    (line,) = found("rollout.sampling.max_new_tokens=77", cut=0.6)
    assert "of the training responses end at rollout.sampling.max_new_tokens=77: raise it, and" in line


MIXED, SOLVED, FAILED = [0.0, 1.0] * 4, [1.0] * 8, [0.0] * 8


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (
            [MIXED] * 2 + [FAILED] * 30,
            "94% of the groups have equal rewards and teach nothing, most of",
        ),
        ([MIXED] * 2 + [FAILED] * 30, "success: add easier problems, or rollout.group_size 8 -> 16"),
        ([FAILED] * 32, "without a success"),
        ([MIXED] * 2 + [SOLVED] * 30, "most of them solved: add harder problems, data.order=signal"),
        ([MIXED] * 8 + [SOLVED, FAILED] * 12, "teach nothing: data.order=signal"),
    ],
)
def test_groups_that_teach_nothing_are_named_with_a_remedy_that_fits(groups, words):
    (line,) = found(rewards=np.concatenate(groups))
    assert words in line


def test_groups_of_which_one_response_is_scored_say_nothing():
    rewards = np.concatenate([MIXED] * 4 + [[np.nan] * 7 + [1.0]] * 28)
    assert not found(rewards=rewards)


def test_steps_that_trained_nothing_hide_no_finding():
    rows = [
        make_step_row(1, 9.0, trained_tokens=300, learner_s=2.0, learner_tokens_per_s=1000.0),
        make_step_row(2, 9.9, trained_tokens=300, learner_s=0.0, learner_tokens_per_s=float("nan")),
    ]
    (line,) = found(steps=rows)
    assert line.startswith("prompts are 85%")


def test_half_of_the_groups_without_signal_is_no_finding():
    assert not found(rewards=np.concatenate([MIXED, SOLVED] * 16))


def test_prompts_that_fill_the_learner_are_named():
    rows = [make_step_row(1, 9.0, trained_tokens=300, learner_s=2.0, learner_tokens_per_s=1000.0)]
    (line,) = found(steps=rows)
    assert line.startswith("prompts are 85% of the tokens that the learner computes: shorten them")
