"""Groups of episodes in which one policy plays several roles, each compared with the same of the others."""

import pytest

from laminar_py.config.rollout import WithoutSignal
from laminar_py.records.credit import RoleCredit
from laminar_py.records.events import Dropped, Ready, Scored
from laminar_py.records.scoring import Score
from laminar_py.records.trajectory import DropReason
from tests.control.fleet import Fleet


def roles(**rewards):
    return tuple(
        RoleCredit(role=role, reward=reward, turns=(turn,))
        for turn, (role, reward) in enumerate(rewards.items(), 1)
    )


async def scored(*credits, **settings):
    """A fleet with one group, whose members were scored with such credit, or a number."""
    fleet = Fleet(replicas=1, capacity=1, group_size=len(credits), without_signal=WithoutSignal.SKIP, **settings)
    await fleet.report(0)
    await fleet.finish_all(0)
    for trajectory, credit in zip(fleet.unscored, credits, strict=True):
        whole = credit if isinstance(credit, float) else sum(one.reward for one in credit)
        given = () if isinstance(credit, float) else credit
        await fleet.scheduler.incoming.on_score(Score(trajectory_id=trajectory.id, value=whole, roles=given))
    return fleet


def ready(fleet):
    return [event for event in fleet.log.events if isinstance(event, Ready)]


async def test_each_role_is_compared_with_the_same_role_of_the_others():
    episodes = [
        roles(first=1.0, second=0.0),
        roles(first=1.0, second=0.0),
        roles(first=0.0, second=1.0),
        roles(first=1.0, second=0.0),
    ]
    fleet = await scored(*episodes)
    events = ready(fleet)
    assert [event.roles[0].advantage for event in events] == pytest.approx([0.5, 0.5, -1.5, 0.5], abs=1e-3)
    assert [event.roles[1].advantage for event in events] == pytest.approx([-0.5, -0.5, 1.5, -0.5], abs=1e-3)
    assert [event.roles for event in fleet.log.events if isinstance(event, Scored)] == episodes
    (group,) = fleet.scheduler.state.groups.values()
    assert [member.as_ref().roles for member in group.members.values()] == [event.roles for event in events]


async def test_rewards_that_add_up_to_the_same_teach_where_roles_differ():
    assert len(ready(await scored(roles(a=1.0, b=0.0), roles(a=0.0, b=1.0)))) == 2


async def test_a_role_that_nobody_played_is_on_record_alone():
    episodes = [
        (RoleCredit(role="a", reward=1.0, turns=(1,)), RoleCredit(role="judge", reward=judged, turns=()))
        for judged in (0.0, 1.0)
    ]
    fleet = await scored(*episodes)
    drops = [event.reason for event in fleet.log.events if isinstance(event, Dropped)]
    assert drops == [DropReason.NO_SIGNAL] * 2
    assert [event.roles for event in fleet.log.events if isinstance(event, Scored)] == episodes


async def test_roles_that_all_earn_the_same_teach_nothing():
    fleet = await scored(roles(a=1.0, b=0.0), roles(a=1.0, b=0.0))
    drops = [event.reason for event in fleet.log.events if isinstance(event, Dropped)]
    assert drops == [DropReason.NO_SIGNAL] * 2


async def test_what_one_member_alone_has_is_compared_with_nothing():
    """A role that one episode alone has, and an episode without roles: a cap ended it."""
    events = ready(await scored(roles(a=1.0, b=5.0), roles(a=0.0), 0.0))
    first, second, cut = events
    assert [one.advantage for one in first.roles] == pytest.approx([0.707, 0.0], abs=1e-3)
    assert [one.advantage for one in second.roles] == pytest.approx([-0.707], abs=1e-3)
    assert (cut.advantage, cut.roles) == (0.0, ())
