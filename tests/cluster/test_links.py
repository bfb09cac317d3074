"""Links of a run: measured between Ray nodes of several addresses, or assumed."""

import logging
import math
import subprocess
import sys
from dataclasses import astuple, replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.config.cluster import RelayConfig
from laminar_py.records.codec import decode
from laminar_py.relay.link_speed import LinkSpeed
from laminar_py.relay.sockets import RelayKeys
from laminar_py.relay.tree import Links
from laminar_py.runtime.cluster.backend import nodes
from laminar_py.runtime.cluster.links import (
    ASSUMED,
    MeasuredHop,
    Pair,
    find_links,
    links_of,
    pairs,
    receive_to_measure,
    send_to_measure,
)
from laminar_py.runtime.cluster.placement import Needs, Placement
from tests.runs.fake_cluster import FakeCluster, joined

INSIDE, OUTSIDE = LinkSpeed(1e9, 1e-4), LinkSpeed(1e8, 1e-3)
AUTO = RelayConfig()
KEYS = RelayKeys.generate()


@pytest.mark.parametrize(
    ("cap", "inside", "outside", "links"),
    [
        (None, None, None, Links(1.25e9, 2e-4, math.inf)),
        (None, INSIDE, None, Links(1e9, 1e-4, math.inf)),
        (None, INSIDE, OUTSIDE, Links(1e9, 1e-4, 1e8)),
        (None, None, OUTSIDE, Links(1e8, 1e-3, 1e8)),  # each host is a zone of its own
        (3e8, INSIDE, None, Links(3e8, 1e-4, math.inf)),
        (3e8, None, OUTSIDE, Links(1e8, 1e-3, 1e8)),
    ],
)
def test_links_are_as_measured_and_no_faster_than_the_cap(cap, inside, outside, links):
    assert astuple(links_of(cap, inside=inside, outside=outside)) == pytest.approx(astuple(links))


@pytest.mark.parametrize(
    ("addresses", "zones", "near", "far"),
    [
        ("aaa", "---", None, None),
        ("abc", "---", Pair(0, 1), None),
        ("aab", "---", Pair(0, 2), None),
        ("abcd", "rsrs", Pair(0, 2), Pair(0, 1)),
        ("abc", "rss", Pair(1, 2), Pair(0, 1)),
        ("abc", "rst", None, Pair(0, 1)),
    ],
)
def test_hops_are_measured_between_different_hosts_from_the_root_where_that_can_be(addresses, zones, near, far):
    assert pairs(addresses, zones) == (near, far)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("rst")), max_size=8))
def test_of_all_hops_that_would_do_the_first_is_measured(relays):
    addresses, zones = [address for address, _ in relays], [zone for _, zone in relays]
    hops = [Pair(*pair) for pair in combinations(range(len(relays)), 2) if len({addresses[i] for i in pair}) == 2]
    near = [hop for hop in hops if zones[hop.sender] == zones[hop.receiver]]
    far = [hop for hop in hops if hop.sender == 0 and zones[0] != zones[hop.receiver]]
    assert pairs(addresses, zones) == (next(iter(near), None), next(iter(far), None))


async def test_a_link_that_is_named_is_not_measured():
    class Apart:
        """A placement of hosts that cannot be reached."""

        def ip(self, host):
            return host

    links = await find_links(RelayConfig(link_gbit_per_s=80), ["a", "b", "c"], ["r", "r", "s"], Apart(), KEYS)
    assert astuple(links) == pytest.approx((1e10, ASSUMED.overhead_s, math.inf))


def test_an_end_of_a_probe_answers_why_it_failed():
    assert "ZMQError" in decode(MeasuredHop, receive_to_measure("127.0.0.1", "9", "short", "key")).reason
    assert "ZMQError" in decode(MeasuredHop, send_to_measure("127.0.0.1", "0", "short", "key")).reason
    code = (
        "import resource; from laminar_py.records.codec import decode\n"
        "from laminar_py.runtime.cluster import links\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "for end in links.send_to_measure, links.receive_to_measure:\n"
        "    print(decode(links.MeasuredHop, end('127.0.0.1', '9', '', '')).reason)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("Too many open files") == 2


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with joined(FakeCluster(0, 0, 0)):
        yield


def placed(network="127.0.0"):
    """Relays on three Ray nodes, each with an address of its own."""

    def see():
        return [replace(node, ip=f"{network}.{index + 1}") for index, node in enumerate(nodes())]

    return Placement(Needs(ranks=1, rank_gpus=0, replicas=3, replica_gpus=0), see)


async def test_hosts_that_nobody_described_are_measured(caplog):
    placement = placed()
    caplog.set_level(logging.INFO, "laminar_py.runtime.cluster.links")
    links = await find_links(AUTO, placement.plan.relays, ["r", "r", "s"], placement, KEYS)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "measured from 127.0.0.1 to 127.0.0.2",
        "measured from 127.0.0.1 to 127.0.0.3",
    ]
    assert links.bytes_per_s > 10e6
    assert links.bytes_per_s != ASSUMED.bytes_per_s
    assert links.zone_bytes_per_s < math.inf


@pytest.mark.parametrize(
    "hosts",
    [(0, 1), (0, 0, 0)],
    ids=["two nodes", "one host"],
)
async def test_nothing_is_measured_where_nothing_depends_on_it(caplog, hosts):
    placement = placed()
    caplog.set_level(logging.INFO, "laminar_py.runtime.cluster.links")
    on = [placement.plan.relays[host] for host in hosts]
    links = await find_links(AUTO, on, [""] * len(on), placement, KEYS)
    assert (links.bytes_per_s, links.zone_bytes_per_s) == (ASSUMED.bytes_per_s, math.inf)
    assert caplog.records == []


async def test_hosts_that_cannot_be_measured_cost_a_line(caplog):
    placement = placed("192.0.2")  # which no machine has
    links = await find_links(AUTO, placement.plan.relays, [""] * 3, placement, KEYS)
    assert (links.bytes_per_s, links.zone_bytes_per_s) == (ASSUMED.bytes_per_s, math.inf)
    (record,) = caplog.records
    assert record.message.startswith("not measured from 192.0.2.1 to 192.0.2.2, so 10 Gbit/s")
    assert "\n" not in record.message
