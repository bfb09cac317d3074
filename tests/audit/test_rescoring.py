"""Rewards computed again: which of them count as others than they were."""

import json

import pytest

from laminar_py.audit.rescoring import RecordedScore
from laminar_py.config.reward import RewardConfig
from laminar_py.records.scoring import Score
from tests.reward.requests import make_request

LENGTH = {"kind": "length", "most": 9}
STEPS = {"kind": "steps", "urls": ["http://none"], "separator_id": 0, "labels": [1, 2]}


@pytest.mark.parametrize(
    ("use", "before", "now", "line"),
    [
        ([LENGTH], 1.0, 1.0 + 5e-7, None),
        ([LENGTH], 40.0, 40.0 + 2e-5, None),
        ([LENGTH], 1.0, 0.0, "g0.0: 1 on record, 0 now"),
        ([LENGTH], 1.0, None, "g0.0: 1 on record, no value (503) now"),
        ([LENGTH], None, None, None),
        ([LENGTH], None, 1.0, None),
        ([LENGTH, STEPS], 28.0, 28.002, None),
        ([LENGTH, STEPS], 0.5, 0.4, "g0.0: 0.5 on record, 0.4 now"),
    ],
)
def test_a_reward_differs_where_there_was_one_and_it_is_another_today(use, before, now, line):
    reward = RewardConfig.model_validate_json(json.dumps({"use": use}))
    score = Score(trajectory_id="g0.0", value=now, detail="503" if now is None else "")
    assert RecordedScore(make_request("x"), before).difference(score, reward) == line
