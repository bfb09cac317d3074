"""Rewards of groups as the stream of prompts is told them, and as the ledger has them for the next one."""

import pytest

from laminar_py.config.rollout import WithoutSignal
from laminar_py.ledger.recovery import closed_groups
from laminar_py.records.scoring import GroupRewards
from tests.control.fleet import Fleet
from tests.ledger.runs import begin, open_ledger

REWARDS = {"g0": (1.0, 0.0), "g1": (0.0, 0.0), "g2": (1.0, 1.0), "g3": (0.5, 1.0)}
TOLD = [GroupRewards(place, f"p{place}", REWARDS[f"g{place}"]) for place in range(4)]


async def close_groups(fleet, *, lost):
    """Four groups end; of one nothing is left."""
    await fleet.report(0)
    for id in list(fleet.running[0]):
        if id.startswith(lost):
            await fleet.refuse(0, id)
        else:
            await fleet.finish(0, id, admissible=0)
    for index, pair in enumerate(REWARDS.values()):
        mine = [one for one in fleet.unscored if one.group_id == f"g{index}"]
        others = [one for one in fleet.unscored if one.group_id != f"g{index}"]
        fleet.unscored = mine
        await fleet.score_all(lambda sample, pair=pair: pair[sample])
        fleet.unscored = others


@pytest.mark.parametrize("without_signal", WithoutSignal)
async def test_each_group_that_closes_is_told_once_and_the_record_says_the_same(tmp_path, without_signal):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        settings = {"replicas": 1, "group_size": 2, "capacity": 8, "recorder": ledger}
        fleet = Fleet(without_signal=without_signal, **settings)
        await close_groups(fleet, lost="g3.")
        await ledger.commit()
    assert sorted(fleet.told, key=lambda group: group.place) == TOLD[:3]
    assert list(closed_groups(tmp_path)) == TOLD[:3]
