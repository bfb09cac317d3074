"""Responses that scorers see while they generate: the longest news first, each piece once."""

import json

import pytest

from laminar_py.config.reward import RewardConfig
from laminar_py.runtime.orchestrator.scoring import AT_A_TIME, Foresight
from tests.control.fleet import Fleet

STEPS = {"kind": "steps", "urls": ["http://none"], "separator_id": 0, "labels": [1, 2]}
EXACT = {"kind": "exact", "pattern": "(x)"}


def foresight(**reward) -> Foresight:
    return Foresight(RewardConfig.model_validate_json(json.dumps({"use": [EXACT, STEPS]} | reward)))


def shown(sight: Foresight, fleet: Fleet) -> dict[str, int]:
    chosen = sight.choose(fleet.scheduler.book.live)
    return {part.response.trajectory_id: part.tokens[-1].end for part in chosen}


async def test_what_has_grown_is_shown_once_and_what_has_ended_never():
    fleet, sight = Fleet(replicas=1), foresight()
    await fleet.report(0)
    assert shown(sight, fleet) == {}, "nothing has a token"
    for name, tokens in {"g0.0": 5, "g0.1": 3, "g0.2": 4}.items():
        await fleet.grow(0, name, tokens=tokens)
    assert shown(sight, fleet) == {"g0.0": 5, "g0.1": 3, "g0.2": 4}
    await fleet.grow(0, "g0.1", tokens=2)
    await fleet.finish(0, "g0.2")
    assert shown(sight, fleet) == {"g0.1": 5}
    assert shown(sight, fleet) == {}


async def test_an_interrupted_response_is_shown_when_it_goes_on():
    fleet, sight = Fleet(replicas=1), foresight()
    await fleet.report(0)
    await fleet.grow(0, "g0.0", tokens=5)
    assert shown(sight, fleet) == {"g0.0": 5}
    await fleet.lose_replica(0)
    assert shown(sight, fleet) == {}
    await fleet.report(0)
    await fleet.grow(0, "g0.0", tokens=1)
    assert shown(sight, fleet) == {"g0.0": 6}


async def test_the_longest_news_come_first_and_the_others_next_time():
    fleet, sight = Fleet(replicas=1, group_size=16), foresight()
    await fleet.report(0)
    for index in range(AT_A_TIME + 1):
        await fleet.grow(0, f"g0.{index}", tokens=index + 1)
    assert list(shown(sight, fleet).values()) == list(range(AT_A_TIME + 1, 1, -1))
    assert shown(sight, fleet) == {"g0.0": 1}


@pytest.mark.parametrize("reward", [{"use": [EXACT]}, {"workers": 2}])
def test_nothing_is_shown_for_terms_without_foresight_or_to_scorers_that_share_the_work(reward):
    assert not foresight(**reward).is_wanted


async def test_tasks_whose_reward_does_not_look_ahead_are_left_out():
    fleet, sight = Fleet(replicas=1), foresight(use=[EXACT], by_task={"proofs": [STEPS]})
    assert sight.is_wanted
    await fleet.report(0)
    await fleet.grow(0, "g0.0", tokens=5)
    assert shown(sight, fleet) == {}
