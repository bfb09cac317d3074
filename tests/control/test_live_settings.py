"""Settings that change during a run: the scheduler and the audit follow them from the next batch on."""

import asyncio
from types import SimpleNamespace

import pytest

from laminar_lab.audit.checks import ConsumptionCheck
from laminar_py.config.loading import load_config
from laminar_py.config.rollout import StalePolicy
from laminar_py.config.section import ConfigError
from laminar_py.control.alarms.data import StalenessCheck
from laminar_py.control.live_settings import LiveSettings
from laminar_py.records.events import Consumed, RunStarted, SettingChanged, VersionPublished
from laminar_py.records.trajectory import DropReason, Kind
from tests.control.fleet import Fleet, settle
from tests.control.test_consumption import make_fleet, make_ready, reasons, take
from tests.control.test_steering import ROW
from tests.events import stepped
from tests.runs.runs import REPO

BOUND = "staleness.max_staleness"
WAITED = SimpleNamespace(spare=0, waited_s=1.0)


def make_settings(fleet, *overrides):
    lines = []
    config = load_config(REPO / "configs/quickstart.yaml", ["staleness.max_staleness=1", *overrides])
    return LiveSettings(config, scheduler=fleet.scheduler, show_line=lines.append), lines


def changes(fleet):
    return [event for event in fleet.log.events if isinstance(event, SettingChanged)]


def test_a_change_moves_the_bound_and_the_groups_in_flight_and_is_on_record():
    fleet = Fleet(batch=4, capacity=400, max_staleness=1, policies=(StalePolicy.DROP,))
    settings, _ = make_settings(fleet)
    assert fleet.scheduler.state.settings.admission.limit == 8
    assert settings.change(f"{BOUND}=3", by="user") == f"step 0: {BOUND} 1 -> 3"
    now = fleet.scheduler.state.settings
    assert (now.bound.max_staleness, now.bound.policies, now.admission.limit) == (3, (StalePolicy.DROP,), 16)
    assert changes(fleet) == [SettingChanged(step=0, name=BOUND, value=3, by="user")]
    assert settings.change(f"{BOUND}=3", by="user") == f"{BOUND} is 3 already"
    settings.change("learner.publish_every=2", by="user")
    assert fleet.scheduler.state.settings.admission.limit == 12
    assert settings.change("buffer.capacity=256", by="user") == "step 0: buffer.capacity its default -> 256"
    assert fleet.scheduler.state.settings.admission.capacity == 256 // settings.config.rollout.group_size
    assert len(changes(fleet)) == 3


def test_a_refused_change_changes_nothing():
    fleet = Fleet(max_staleness=1)
    settings, _ = make_settings(fleet)
    before, config = fleet.scheduler.state.settings, settings.config
    with pytest.raises(ConfigError):
        settings.change("learner.publish_every=9", by="user")
    assert (fleet.scheduler.state.settings, settings.config, changes(fleet)) == (before, config, [])


async def test_a_batch_follows_one_bound_and_the_next_batch_the_changed_one():
    fleet = make_fleet(groups=1, max_staleness=1, policies=(StalePolicy.REWEIGHT,))
    settings, _ = make_settings(fleet, "staleness.policies=[wait, reweight]")
    await make_ready(fleet, [10, 20])
    fleet.learned(2)  # both groups are of version 0
    first = await take(fleet, 1, version=2)
    assert not settings.may_change
    with pytest.raises(AssertionError, match="a batch is in the learner"):
        settings.change(f"{BOUND}=2", by="user")
    await fleet.scheduler.consumption.commit(first, 3)
    assert settings.may_change
    settings.change(f"{BOUND}=8", by="user")
    second = await take(fleet, 1, version=2)
    assert {t.weight for t in first.trajectories} == {2 / 3}, "staleness 2, bound 1"
    assert {t.weight for t in second.trajectories} == {1.0}
    assert second.spare == 0
    assert first.spare == 1


async def test_a_lower_bound_drops_what_is_too_old_for_it():
    fleet = make_fleet(groups=1, max_staleness=4, policies=(StalePolicy.DROP,))
    settings, _ = make_settings(fleet, "staleness.policies=[wait, drop]", "staleness.max_staleness=4")
    await make_ready(fleet, [10])
    fleet.learned(2)
    settings.change(f"{BOUND}=1", by="user")
    waiting = asyncio.create_task(take(fleet, 1, version=2))
    await settle()
    waiting.cancel()
    assert reasons(fleet) == {DropReason.STALE: 2}


def test_control_changes_the_bound_after_a_step_and_says_why():
    fleet = Fleet(batch=4, capacity=400, max_staleness=1)
    settings, lines = make_settings(fleet, "staleness.control.window=2")
    for _ in range(4):
        assert settings.stepped(ROW, WAITED) == ""
    (change,) = changes(fleet)
    assert (change.value, change.by) == (2, "control")
    assert lines == [f"step 0: {BOUND} 1 -> 2, since {change.reason}"]
    assert settings.config.staleness.max_staleness == 2


def test_control_leaves_a_setting_that_the_user_changes_by_hand():
    fleet = Fleet(batch=4, capacity=400, max_staleness=1)
    settings, lines = make_settings(fleet, "staleness.control.window=2")
    said = settings.change(f"{BOUND}=1", by="user")
    assert said == f"step 0: {BOUND} 1 -> 1, which staleness.control leaves from now on"
    assert settings.change(f"{BOUND}=1", by="user") == f"{BOUND} is 1 already"
    for _ in range(20):
        settings.stepped(ROW, WAITED)
    assert ([one.by for one in changes(fleet)], lines) == (["user"], [])
    held = LiveSettings(settings.config, scheduler=fleet.scheduler, held=[BOUND])
    for _ in range(20):
        held.stepped(ROW, WAITED)
    assert len(changes(fleet)) == 1, "a resume leaves it too"


def test_control_returns_to_the_publishes_that_the_user_wrote_and_not_to_those_on_record():
    fleet = Fleet(batch=4, capacity=400, max_staleness=4, publish_every=3)
    config = load_config(
        REPO / "configs/quickstart.yaml",
        ["staleness.control={window: 2, max_publish_every: 4}", "learner.publish_every=3"],
    )
    settings = LiveSettings(config, scheduler=fleet.scheduler, publish_every=1)
    for _ in range(40):
        settings.stepped(ROW, SimpleNamespace(spare=0, waited_s=0.0))
    assert [(one.name, one.value) for one in changes(fleet)] == [
        ("learner.publish_every", 2),
        ("learner.publish_every", 1),
    ]


def consumed(step, staleness, *, weight=1.0):
    return Consumed(trajectory_id=f"t{step}", step=step, version=step - 1, staleness=staleness, weight=weight)


def made(bound):
    return RunStarted(incarnation=1, host="a", pid=1, schema=1, config_digest="", drain=True, max_staleness=bound)


def published(version, step):
    return VersionPublished(
        version=version, step=step, incarnation=1, parent=None, digest="", num_bytes=1, stall_s=0.0
    )


def step_made(step):
    return stepped(step, num_trajectories=1, num_tokens=1, grad_norm=0.1, reward=None, elapsed_s=1.0)


def set_bound(value):
    return SettingChanged(step=0, name=BOUND, value=value, by="user")


def judge(*events):
    """Violations of a log whose trajectories all begin under version 0."""
    check = ConsumptionCheck()
    row = SimpleNamespace(id="t", kind=Kind.TRAIN, oldest_version=0)
    return [str(one) for event in events for one in check.check_event(event, row)]


def test_the_audit_judges_a_trajectory_by_the_bound_in_force_at_its_step():
    begin = [made(1), published(0, 0), consumed(1, 0), step_made(1), consumed(2, 1), step_made(2)]
    assert judge(*begin, set_bound(2), consumed(3, 2)) == []
    assert "2 exceeds the bound of 1" in judge(*begin, consumed(3, 2))[0]
    assert "2 exceeds the bound of 1" in judge(*begin, set_bound(8), set_bound(1), consumed(3, 2))[0]
    assert judge(*begin, set_bound(0), consumed(3, 2, weight=0.5)) == []


def test_the_audit_judges_by_the_bound_of_the_consumption_where_the_version_is_recorded_later():
    late = [made(0), consumed(1, 0), step_made(1), set_bound(4), consumed(2, 1), step_made(2), set_bound(0)]
    assert judge(*late, published(0, 0)) == []


def test_the_alarm_on_drops_follows_the_bound():
    config = load_config(REPO / "configs/quickstart.yaml", ["staleness.policies=[wait, drop]"])
    check = StalenessCheck(config.staleness)
    assert check.consumed(consumed(9, 5), None)
    check.changed(set_bound(6), None)
    assert not check.consumed(consumed(9, 5), None)
