"""Lengths of a run, for the plan of the next one."""

import numpy as np
import pytest

from laminar_lab.plan.inputs import TaskLengths, lengths_of_run, prompt_share
from laminar_lab.plan.judge import shrunk_fleet
from laminar_lab.plan.placements import placements
from tests.plan.builders import make_request

GROUPS = 6_000


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("sizes", [(8,), (2, 14)], ids=["even", "uneven"])
def test_a_share_of_the_variance_that_is_between_groups_is_found_again(share, sizes):
    draw = np.random.default_rng(2)
    groups = np.repeat(np.arange(GROUPS), np.resize(sizes, GROUPS))
    between, within = draw.standard_normal(GROUPS)[groups], draw.standard_normal(len(groups))
    lengths = 1e6 * np.exp(np.sqrt(share) * between + np.sqrt(1 - share) * within)
    shuffled = draw.permutation(len(groups))
    assert prompt_share(lengths[shuffled], groups[shuffled]) == pytest.approx(share, abs=0.02)


def test_responses_of_one_prompt_each_say_nothing_of_prompts():
    assert prompt_share(np.arange(5), np.arange(5)) == 0.0
    assert prompt_share(np.ones(6), np.array([0, 0, 1, 1, 2, 2])) == 0.0


def test_what_a_run_tells_of_lengths_is_what_the_simulator_is_given():
    measured = TaskLengths(task="all", count=4000, p50=800.0, p99=7200.0, prompt_share=0.6)
    lengths = lengths_of_run(measured, cap=16_384, prompt=300)
    request = make_request(lengths=lengths, prompts_per_step=8, group_size=8)
    config, _ = shrunk_fleet(request, placements(request)[0], replicas=4, seed=0)
    emulation = config.rollout.engine
    assert (emulation.median_tokens, emulation.prompt_share) == (800, 0.6)
    assert emulation.sigma == pytest.approx(lengths.sigma)
