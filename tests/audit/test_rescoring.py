"""Rewards computed again: which of them count as others than they were."""

import json
from functools import partial

import pytest

from laminar_lab.audit.rescoring import RecordedScore, recorded_scores
from laminar_lab.audit.samples import read_sample
from laminar_lab.audit.stories import describe_events
from laminar_py.config.reward import RewardConfig
from laminar_py.records.events import Scored
from laminar_py.records.scoring import Score, TermValue
from tests.ledger import runs
from tests.ledger.runs import begin, finish, issue, make_ready, open_ledger, run_to
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


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        ((0.5, -0.25), (0.51, -0.25), None),
        ((0.5, -0.25), (0.5, -0.2501), "length -0.25 on record, -0.2501 now (reward 0.25, 0.2499)"),
        ((0.5, -0.25), (0.6, -0.25), "steps 0.5 on record, 0.6 now (reward 0.25, 0.35)"),
        ((0.5, -0.25), (0.25, 0.0), "steps 0.5 on record, 0.25 now (reward 0.25, 0.25)"),
    ],
)
def test_each_term_is_compared_by_its_own_rounding(before, now, line):
    reward = RewardConfig.model_validate_json(json.dumps({"use": [STEPS, LENGTH]}))
    names = ("steps", "length")
    terms = [TermValue(name=name, value=value) for name, value in zip(names, now, strict=True)]
    recorded = RecordedScore(make_request("x"), sum(before), dict(zip(names, before, strict=True)))
    told = recorded.difference(Score(trajectory_id="g0.0", value=sum(now), terms=terms), reward)
    assert told == (None if line is None else f"g0.0: {line}")


def test_another_weight_is_another_reward():
    reward = RewardConfig.model_validate_json(json.dumps({"use": [LENGTH | {"weight": 3}]}))
    score = Score(trajectory_id="g0.0", value=-1.5, terms=[TermValue(name="length", value=-0.5)])
    told = RecordedScore(make_request("x"), -0.5, {"length": -0.5}).difference(score, reward)
    assert told == "g0.0: -0.5 on record, -1.5 now"


async def test_terms_are_those_on_record_and_the_story_tells_a_reward_in_short(tmp_path, monkeypatch):
    terms = [TermValue(name="length", value=0.5, text="long")]
    monkeypatch.setattr(runs, "Scored", partial(Scored, terms=terms))
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        issue(ledger, "g0.0")
        run_to(ledger, "g0.0", [(0, 0, 5)])
        finish(ledger, "g0.0", [(0, 0, 5)], reward=0.46599999999999997)
        make_ready(ledger, "g1.0", index=1)
    assert [found.terms for found in recorded_scores(tmp_path)] == [{"length": 0.5}] * 2
    assert "reward 0.466 " in "\n".join(describe_events(read_sample(tmp_path, "g0.0").story))
