"""Other settings for a running run: checked as the whole config that it began with."""

import pytest

from laminar_py.config.changes import changed, scaled
from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from tests.runs.runs import REPO


def config(*settings):
    return load_config(REPO / "configs/quickstart.yaml", ["rollout.batch_per_replica=128", *settings])


def test_the_config_of_a_larger_fleet_differs_in_that_alone():
    before = config("rollout.replicas=2")
    after = scaled(before, 6)
    assert after.rollout.replicas == 6
    assert after.capacity == before.capacity + 4 * 128
    assert scaled(after, 2) == before


@pytest.mark.parametrize(
    ("settings", "replicas", "line"),
    [
        ((), 0, "rollout.replicas=0: input should be greater than or equal to 1"),
        (
            ("rollout.prompts_per_step=64", "rollout.group_size=4"),
            1,
            "rollout.replicas=1: a learner step takes 256 new trajectories (rollout.prompts_per_step *"
            " rollout.group_size, without replayed ones), and 1 with rollout.batch_per_replica=128 admit 128 under"
            " a version; ask for 2",
        ),
        (
            ("rollout.engine.kind=sglang", "rollout.engine.urls=[http://127.0.0.1:1]", "rollout.replicas=1"),
            2,
            "rollout.replicas=2: this run attaches to 1 servers; stop it and resume it with another",
        ),
    ],
)
def test_what_no_fleet_can_be_is_refused_in_one_line(settings, replicas, line):
    with pytest.raises(ConfigError) as refused:
        scaled(config(*settings), replicas)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_a_fleet_may_shrink_to_what_a_step_without_its_replayed_groups_needs():
    replays = ["rollout.prompts_per_step=64", "rollout.group_size=4", "buffer.replay.share=0.5"]
    before = config(*replays)
    assert before.new_per_step == before.rollout.batch_per_replica
    assert scaled(before, 1).rollout == before.rollout.model_copy(update={"replicas": 1})


def test_a_fleet_that_grows_or_whose_versions_mix_may_be_smaller_than_a_step():
    large = ["rollout.prompts_per_step=96", "rollout.group_size=4", "rollout.replicas=1"]
    assert scaled(config(*large), 2).rollout.replicas == 2
    mixing = [*large[:2], "rollout.replicas=3", "rollout.on_new_weights=resume"]
    assert scaled(config(*mixing), 1).rollout.replicas == 1


def test_a_changed_setting_is_the_only_difference():
    before = config()
    after = changed(changed(before, "staleness.max_staleness=6"), "buffer.capacity=512")
    assert (after.staleness.max_staleness, after.capacity) == (6, 512)
    assert changed(before, "rollout.replicas=3") == scaled(before, 3)
    together = changed(before, "learner.publish_every=6", "staleness.max_staleness=8")
    assert (together.learner.publish_every, together.staleness.max_staleness) == (6, 8), "in either order"
    back = after.model_copy(update={"staleness": before.staleness, "buffer": before.buffer})
    assert back == before


@pytest.mark.parametrize(
    ("settings", "change", "line"),
    [
        ((), "learner.lr=1e-4", "learner.lr=1e-4: a running run takes staleness.max_staleness"),
        ((), "learner.lr=1e-4", "resume it with learner.lr=1e-4"),
        ((), "staleness.max_stale=1", "staleness.max_stale=1: unknown key"),
        ((), "staleness.max_staleness", "not of the form key=value"),
        ((), "staleness.max_staleness=null", "is no whole number"),
        ((), "staleness.max_staleness=true", "is no whole number"),
        ((), "staleness.max_staleness=-1", "staleness.max_staleness=-1: input should be greater than"),
        (("staleness.max_staleness=null",), "staleness.max_staleness=4", "the run began without a bound"),
        ((), "buffer.capacity=8", "buffer.capacity=8 is below one learner step"),
        ((), "learner.publish_every=9", "trajectories between two versions are older"),
        ((), "learner.world_size=0", "learner.world_size=0: input should be greater than"),
        (("learner.shard_ranks=1",), "learner.world_size=0", "learner.world_size=0: input should be greater than"),
        (
            ("cluster.share=true",),
            "learner.world_size=2",
            "learner and replicas share devices; stop the run, and resume",
        ),
        (("staleness.control={max: 5}",), "staleness.max_staleness=6", "staleness.control moves it from 1 to 5"),
    ],
)
def test_a_change_that_the_config_or_a_running_run_refuses_is_one_line(settings, change, line):
    with pytest.raises(ConfigError) as refused:
        changed(config(*settings), change)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (("staleness.control={min: 4, max: 2}",), "staleness.control.min=4: is above staleness.control.max=2"),
        (("staleness.control={}", "staleness.max_staleness=null"), "staleness.max_staleness=null"),
        (
            ("staleness.control={}", "buffer.replay.share=0.5"),
            "staleness.control would take replayed",
        ),
        (("staleness.control={}", "schedule=one_step"), "admit as much at any bound"),
        (("staleness.control={}", "staleness.policies=[drop]"), "admit as much at any bound"),
    ],
)
def test_control_without_a_bound_that_admission_follows_is_refused(settings, line):
    with pytest.raises(ConfigError, match=line):
        config(*settings)


def test_the_default_capacity_has_room_for_the_largest_bound():
    wide = config("staleness.control.max=8")
    assert wide.capacity == config().capacity + 5 * wide.trajectories_per_step
