"""Actions in the text of a turn, by the patterns of the kinds: which text is taken, and at what cost."""

import time

import pytest

from laminar_contrib.environments.openenv_kind import JSON_OBJECT
from laminar_contrib.environments.reasoning_gym_kind import ANSWER_TAGS
from laminar_contrib.environments.turns import ActionConfig

SETTINGS = ActionConfig(kind="openenv")


@pytest.mark.parametrize(
    ("pattern", "turn", "action"),
    [
        (JSON_OBJECT, 'I take {"low": {"at": 1}} now', '{"low": {"at": 1}}'),
        (JSON_OBJECT, "<think>{1}</think>\n{2}\n", "{2}"),
        (JSON_OBJECT, "} none {", None),
        (ANSWER_TAGS, "<answer>7</answer> or <answer>\n8 </answer>", "8"),
        (ANSWER_TAGS, "<answer>7 <answer>8</answer>", "8"),
        (ANSWER_TAGS, "<answer>7</answer> <answer>8", "7"),
    ],
)
def test_the_last_action_of_a_turn_counts(pattern, turn, action):
    assert SETTINGS.find_action(turn, default=pattern) == action


@pytest.mark.parametrize("piece", ["{", "}{", "<answer>", "<answer></answer", "<think>{</think>"])
@pytest.mark.parametrize("pattern", [JSON_OBJECT, ANSWER_TAGS])
def test_the_cost_of_a_long_turn_is_bounded(pattern, piece):
    start = time.process_time()
    SETTINGS.find_action(piece * (200_000 // len(piece)), default=pattern)
    assert time.process_time() - start < 5
