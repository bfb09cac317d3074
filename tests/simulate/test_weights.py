"""Versions on their way: down the tree of the config, host after host, and kept for a while."""

import asyncio

import pytest

from laminar_lab.simulate.virtual_loop import virtually
from laminar_lab.simulate.weights import ModelledWeights
from laminar_lab.step_time import host_arrivals_s
from laminar_py.records.weights import VersionLostError
from tests.simulate.small import run, small

SEVEN_B = 7_600_000_000
WIRE_S = 2 * SEVEN_B / (100e9 / 8)


def arrivals(*settings):
    config = small(
        "rollout.engine.simulation.replicas_per_host=1", "rollout.engine.simulation.link_gbit_per_s=100", *settings
    )
    return host_arrivals_s(config, num_parameters=SEVEN_B)


def test_a_version_takes_its_bytes_over_the_link_and_a_chain_hardly_more():
    near, *others = arrivals("relay.fanout=1")
    assert WIRE_S < near < 1.2 * WIRE_S, "chunks cost something each"
    assert near < others[0] < others[1] < others[2] < 1.1 * near


def test_a_star_takes_as_often_as_long_as_it_has_hosts():
    assert 4 * WIRE_S < max(arrivals("relay.fanout=4")) < 1.2 * 4 * WIRE_S


def test_without_a_link_all_hosts_have_it_at_once():
    assert host_arrivals_s(small(), num_parameters=SEVEN_B) == [0.0]


def test_each_replica_hears_of_a_version_when_its_host_has_it():
    heard = []

    async def wait(weights, replica):
        await weights.weights_for(replica).wait_newer(-1)
        heard.append((replica, round(asyncio.get_running_loop().time(), 6)))

    async def lead():
        weights = ModelledWeights([0.5, 0.25], publish_s=1.0, replicas_per_host=2, keep_versions=2)
        weights.publish_version(0)
        await asyncio.gather(*(wait(weights, replica) for replica in range(4)))
        return weights.root.newest

    assert virtually(lead()) == 0
    assert heard == [(2, 1.25), (3, 1.25), (0, 1.5), (1, 1.5)]


def test_a_version_is_kept_while_it_is_new_or_a_replica_of_the_host_holds_it():
    async def lead():
        weights = ModelledWeights([0.0, 0.0], publish_s=0.0, replicas_per_host=1, keep_versions=2)
        weights.publish_version(0)
        assert (await weights.weights_for(0).pull()).version == 0
        for version in (1, 2):
            weights.publish_version(version)
        await asyncio.sleep(1.0)
        assert (await weights.weights_for(0).pull(0)).version == 0
        with pytest.raises(VersionLostError):
            await weights.weights_for(1).pull(0)
        weights.forget_replica(0)
        with pytest.raises(VersionLostError):
            await weights.weights_for(0).pull(0)

    virtually(lead())


def test_slow_links_make_data_older():
    slow = run("rollout.engine.simulation.link_gbit_per_s=0.5", "rollout.batch_per_replica=48")
    assert slow.figures.staleness_mean > run("rollout.batch_per_replica=48").figures.staleness_mean
