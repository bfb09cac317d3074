"""Size of a fleet over time, from its events and from its samples."""

import math

import pytest

from laminar_py.config.loading import load_config
from laminar_py.observe.quality import count_devices, device_seconds
from laminar_py.observe.record import FleetSizes, Happened, find_presence, fleet_sizes, with_last_fleet
from laminar_py.observe.tails import measure_stragglers
from laminar_py.records.events import PartStarted, ReplicaLeft, RunStarted, Scaled
from laminar_py.records.metrics import FleetRow
from tests.analytics.builders import make_trajectories
from tests.runs.runs import REPO


def started(incarnation):
    none = {"host": "h", "pid": 1, "schema": 1, "config_digest": "", "drain": True, "max_staleness": None}
    return RunStarted(incarnation=incarnation, **none)


def row(rl_s, running):
    """A sample of these replicas, by number."""
    none = [0] * len(running)
    kv = [0.5] * len(running)
    rest = {"versions": none, "waiting": none, "generated_tokens": 0, "kv_s": 0.0, "kv_use": kv}
    return FleetRow(rl_s=rl_s, replicas=list(running), running=list(running.values()), **rest)


def test_a_replica_is_there_from_its_process_on_until_it_has_left_or_another_incarnation_begins():
    events = [
        (-5.0, started(1)),
        (-4.0, Scaled((0, 1))),
        (-2.0, PartStarted("replica-0", 1)),
        (10.0, Scaled((0, 1, 2))),
        (13.0, PartStarted("replica-2", 2)),
        (20.0, Scaled((0, 2))),
        (22.0, ReplicaLeft(1)),
        (30.0, started(2)),
        (31.0, Scaled((0, 1, 2))),
    ]
    found = find_presence([Happened(*one) for one in events], replicas=2)
    spans = sorted(zip(found.replica.tolist(), found.start_s.tolist(), found.end_s.tolist(), strict=True))
    assert spans == [
        (0, -4.0, 30.0),
        (0, 31.0, math.inf),
        (1, -4.0, 22.0),
        (1, 31.0, math.inf),
        (2, 13.0, 30.0),
        (2, 31.0, math.inf),
    ]


def test_a_record_without_such_events_has_the_replicas_of_its_config():
    found = find_presence([Happened(0.0, started(1)), Happened(1.0, PartStarted("replica-0", 1))], replicas=2)
    assert found.replicas == [0, 1]
    assert set(found.start_s.tolist()) == {-math.inf}


def test_device_hours_count_each_replica_as_long_as_it_was_there():
    sizes = fleet_sizes([row(1.0, {0: 1, 1: 1}), row(2.0, {0: 1, 1: 1}), row(10.0, dict.fromkeys(range(6), 1))])
    assert sizes == FleetSizes((1.0, 10.0), (2, 6))
    assert [sizes.replica_seconds(at_s) for at_s in (5.0, 10.0, 12.0)] == [10.0, 20.0, 32.0]
    config = load_config(REPO / "configs/emulation/repack.yaml", ["rollout.replicas=6"])
    learner = count_devices(config)[0] - 6
    assert device_seconds(config, sizes, 12.0) == pytest.approx(32.0 + 12.0 * learner)
    assert device_seconds(config, FleetSizes(), 12.0) == pytest.approx(12.0 * (6 + learner))


def test_what_is_advised_starts_from_the_fleet_that_the_run_has_now():
    config = load_config(REPO / "configs/quickstart.yaml", ["rollout.replicas=2"])
    assert with_last_fleet(config, [Happened(0.0, Scaled((0, 1, 4)))]).rollout.replicas == 3
    assert with_last_fleet(config, []) is config


def test_a_replica_has_the_samples_in_which_it_was_there():
    both = [row(float(at_s), {0: 8, 3: 8}) for at_s in (2, 3, 4)]
    fleet = [row(1.0, {0: 8}), *both, row(5.0, {0: 8, 3: 1}), row(6.0, {0: 8})]
    found = measure_stragglers(make_trajectories(1), fleet)
    assert found.slots == pytest.approx(7.0 / (6 * 8 + 4 * 8))
