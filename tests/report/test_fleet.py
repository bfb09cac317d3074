"""Size of a fleet over time, from its events."""

import math

from laminar_lab.report.snapshot import Happened, changes_by_user, find_presence, with_last_settings
from laminar_py.config.loading import load_config
from laminar_py.records.events import PartStarted, ReplicaLeft, RolledBack, RunStarted, Scaled, SettingChanged
from tests.runs.runs import REPO


def started(incarnation):
    none = {"host": "h", "pid": 1, "schema": 1, "config_digest": "", "drain": True, "max_staleness": None}
    return RunStarted(incarnation=incarnation, **none)


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


def test_what_is_advised_starts_from_the_fleet_that_the_run_has_now():
    config = load_config(REPO / "configs/quickstart.yaml", ["rollout.replicas=2"])
    assert with_last_settings(config, [Happened(0.0, Scaled((0, 1, 4)))]).rollout.replicas == 3
    assert with_last_settings(config, []) is config


def test_changes_by_a_user_are_told_from_those_of_control_and_of_resumes():
    def bound(value, by):
        return SettingChanged(step=9, name="staleness.max_staleness", value=value, by=by)

    events = [started(1), Scaled((0, 1)), bound(2, "user"), bound(3, "control"), RolledBack(5, "learner_crashed")]
    happened = [Happened(0.0, one) for one in [*events, Scaled((0,)), started(2), Scaled((0, 1, 2))]]
    words = ("staleness.max_staleness=2 after step 9", "rollout.replicas=1 after step 5")
    assert changes_by_user(happened) == words
    config = load_config(REPO / "configs/quickstart.yaml", [])
    assert with_last_settings(config, happened).staleness.max_staleness == 3
    assert with_last_settings(config, happened, by_control=False).staleness.max_staleness == 2
