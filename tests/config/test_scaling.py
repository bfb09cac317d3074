"""Another fleet for a run: checked like the one that it began with."""

import pytest

from laminar_py.config.loading import load_config, scaled
from laminar_py.config.section import ConfigError
from tests.runs.runs import REPO

URLS = ["http://127.0.0.1:30000", "http://127.0.0.1:30001"]


def config(*settings):
    return load_config(REPO / "configs/quickstart.yaml", ["rollout.batch_per_replica=128", *settings])


def attached(urls):
    kind = ["rollout.engine.kind=sglang", f"rollout.engine.urls=[{','.join(urls)}]"]
    return config(*kind, f"rollout.replicas={len(urls)}")


def test_the_config_of_a_larger_fleet_differs_in_that_alone():
    before = config("rollout.replicas=2")
    after = scaled(before, replicas=6, urls=None)
    assert after.rollout.replicas == 6
    assert after.capacity == before.capacity + 4 * 128
    assert scaled(after, replicas=2, urls=None) == before


def test_servers_are_named_as_a_whole():
    after = scaled(attached(URLS), replicas=None, urls=[*URLS, "http://127.0.0.1:30002"])
    assert after.rollout.replicas == 3
    assert after.rollout.engine.servers == (*URLS, "http://127.0.0.1:30002")


@pytest.mark.parametrize(
    ("before", "replicas", "urls", "line"),
    [
        ((), 0, None, "rollout.replicas=0: input should be greater than or equal to 1"),
        (
            ("rollout.prompts_per_step=64", "rollout.group_size=4"),
            1,
            None,
            "replicas=1: a learner step takes 256 trajectories (rollout.prompts_per_step * rollout.group_size),"
            " and 1 with rollout.batch_per_replica=128 admit 128 under a version; ask for 2 at least",
        ),
        ((), None, URLS, "urls=http://127.0.0.1:30000,http://127.0.0.1:30001: this run starts its own engines"),
    ],
)
def test_what_no_fleet_can_be_is_refused_in_one_line(before, replicas, urls, line):
    with pytest.raises(ConfigError) as refused:
        scaled(config(*before), replicas=replicas, urls=urls)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("replicas", "urls", "line"),
    [
        (3, None, "replicas=3: this run attaches to 2 servers; name all of the new fleet, as urls=[http://...]"),
        (None, [], "urls=[]: a run needs at least one server"),
        (1, URLS, "replicas=1: urls names 2 servers; leave replicas out"),
        (None, ["nowhere", *URLS], "rollout.engine.urls=nowhere: no address of a server"),
        (None, [URLS[0], URLS[0] + "/"], "rollout.engine.urls="),
    ],
)
def test_what_no_list_of_servers_can_be_is_refused_in_one_line(replicas, urls, line):
    with pytest.raises(ConfigError) as refused:
        scaled(attached(URLS), replicas=replicas, urls=urls)
    assert str(refused.value).startswith(line)


def test_a_fleet_that_grows_or_whose_versions_mix_may_be_smaller_than_a_step():
    large = ["rollout.prompts_per_step=96", "rollout.group_size=4", "rollout.replicas=1"]
    assert scaled(config(*large), replicas=2, urls=None).rollout.replicas == 2
    mixing = [*large[:2], "rollout.replicas=3", "rollout.on_new_weights=resume"]
    assert scaled(config(*mixing), replicas=1, urls=None).rollout.replicas == 1
