"""What dropping costs, on hand-made trajectories."""

import numpy as np
import pytest

from laminar_py.observe.analytics.measure.drops import measure_drops
from laminar_py.observe.analytics.read.columns import CAPS
from laminar_py.observe.analytics.triage.dropping import tell_dropping
from laminar_py.records.trajectory import DropReason, Status
from tests.analytics.builders import make_trajectories

NAN = float("nan")


def with_drops(kept, dropped, *, reason=DropReason.GROUP_DEADLINE, lengths=(10, 30), rewards=(1.0, NAN), **more):
    """So many kept and so many dropped, of these lengths and rewards."""
    count = kept + dropped
    return make_trajectories(
        count,
        status=[Status.CONSUMED] * kept + [Status.DROPPED] * dropped,
        drop=[None] * kept + [reason] * dropped,
        length=np.repeat(lengths, (kept, dropped)),
        reward=np.repeat(rewards, (kept, dropped)),
        **more,
    )


def test_a_row_says_how_many_of_each_length_a_reason_dropped_and_their_rewards():
    trajectories = make_trajectories(
        6,
        status=[Status.CONSUMED] * 3 + [Status.DROPPED] * 3,
        drop=[None] * 3 + [DropReason.STALE] * 3,
        length=[10, 10, 40, 10, 40, 40],
        reward=[1.0, 0.0, 0.0, 1.0, 1.0, NAN],
    )
    table = measure_drops(trajectories)
    (row,) = table.rows
    assert table.edges == (10, 40)
    assert (row.reason, row.count, row.share, row.length) == ("stale", 3, 0.5, 30.0)
    assert [bin.share for bin in row.bins] == pytest.approx([1 / 3, 2 / 3])
    assert [(bin.known, bin.reward) for bin in row.bins] == [(1, 1.0), (1, 1.0)]
    assert [bin.reward for bin in table.kept.bins] == [0.5, 0.0]
    assert (row.known, row.reward, row.expected) == (2, 1.0, 0.25)


def test_groups_without_signal_are_judged_apart():
    trajectories = with_drops(5, 5, reason=DropReason.NO_SIGNAL, rewards=(0.5, 1.0))
    table = measure_drops(trajectories)
    assert (table.any.count, table.kept.count) == (0, 10)
    assert [row.reason for row in table.rows] == ["no_signal"]
    assert tell_dropping(table) == [
        "Nothing was dropped for its length, age or failures: no long reasoning is lost this way.",
        "Groups without signal took 50.0%; they have a mean reward of 1, and nothing of them was trained on"
        " (5 trajectories were).",
    ]


@pytest.mark.parametrize(
    ("lengths", "more", "says"),
    [
        ((10, 11), {"rewards": (1.0, 1.0)}, "1.1x as long as what is kept: dropping does not go by length."),
        ((10, 30), {}, "3.0x as long as what is kept; the rewards of only 0 are known"),
        ((10, 5), {"finish": [0] * 60 + [-1] * 40}, "at least 0.5x as long as what is kept; the rewards of"),
        (
            (10, 30),
            {"rewards": (1.0, 0.5)},
            "have a mean reward of 0.5, and nothing so long is kept: what they could",
        ),
        ((30, 30), {"rewards": (0.0, 1.0)}, "1.0x as long as what is kept: dropping does not go by length."),
    ],
)
def test_words_say_what_is_known_of_dropping(lengths, more, says):
    trajectories = with_drops(60, 40, lengths=lengths, **more)
    (line,) = tell_dropping(measure_drops(trajectories))
    assert line.startswith("40.00% were dropped, ")
    assert says in line


@pytest.mark.parametrize(
    ("right", "says"),
    [(1.0, "dropping trains away long reasoning."), (0.1, "what is dropped is worse, and little is lost.")],
)
def test_long_ones_that_were_right_are_a_loss_and_wrong_ones_are_not(right, says):
    """40 kept ones of 10 tokens, 20 kept of 30 tokens that are right in half, and 40 dropped ones of 30."""
    rewards = [1.0] * 40 + [0.0, 1.0] * 10 + [1.0] * round(40 * right) + [0.0] * round(40 * (1 - right))
    trajectories = make_trajectories(
        100,
        status=[Status.CONSUMED] * 60 + [Status.DROPPED] * 40,
        drop=[None] * 60 + [DropReason.STALE] * 40,
        length=[10] * 40 + [30] * 60,
        reward=rewards,
    )
    (line,) = tell_dropping(measure_drops(trajectories))
    assert f"were right in {right:.0%}, kept ones of the same length were right in 50%" in line
    assert line.endswith(says)


def test_a_cap_that_cut_is_told_with_its_setting():
    trajectories = make_trajectories(10, cap=[CAPS.index("tokens")] + [-1] * 9, reward=[0.0] + [1.0] * 9)
    line = tell_dropping(measure_drops(trajectories))[1]
    assert line.startswith("The cap on tokens (rollout.sampling.max_new_tokens) cut 10.00%")
    assert "they were right in 0%, the kept were right in 90%" in line
