"""Speed of the links between a run's hosts: measured, given by `relay.link_gbit_per_s`, or assumed.

Called by the owner of the relays when a run starts. If a measurement fails, a default is assumed and a warning is
logged (`tests/cluster/test_links.py`).
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from laminar_py.config.cluster import RelayConfig
from laminar_py.records.codec import decode, encode
from laminar_py.relay.link_speed import LinkSpeed, MeasurementError, measure_link, send_chunks
from laminar_py.relay.sockets import RelayKeys
from laminar_py.relay.tree import Links
from laminar_py.runtime.cluster.backend import free_port, on_node
from laminar_py.runtime.cluster.errors import NoAnswerError
from laminar_py.runtime.cluster.placement import Placement

log = logging.getLogger(__name__)

ASSUMED = LinkSpeed(1.25e9, 200e-6)  # of unmeasured links: 10 Gb/s
FEWEST_NODES = 3  # with fewer, a tree has only one shape
MEASURE_S = 90.0  # includes the start of a process on each of the two hosts


@dataclass(frozen=True, slots=True)
class Pair:
    """Numbers of two relays between which a hop is measured; `sender` is nearer to the root."""

    sender: int
    receiver: int


async def find_links(
    relay: RelayConfig, hosts: Sequence[str], zones: Sequence[str], placement: Placement, keys: RelayKeys
) -> Links:
    """Return the links of a tree whose relays are on these nodes ([N] ids) in these zones ([N] labels)."""
    near, far = pairs([placement.ip(host) for host in hosts], zones)
    inside = outside = None
    if relay.link_gbit_per_s is not None:
        inside = LinkSpeed(relay.link_gbit_per_s * 1e9 / 8, ASSUMED.overhead_s)
    elif len(hosts) >= FEWEST_NODES:
        inside = None if near is None else await _measure(near, hosts, placement, keys)
        outside = None if far is None else await _measure(far, hosts, placement, keys)
    return links_of(relay.max_bytes_per_s, inside=inside, outside=outside)


def pairs(addresses: Sequence[str], zones: Sequence[str]) -> tuple[Pair | None, Pair | None]:
    """Choose a pair of relays within a zone and a pair between zones, to measure; [N] relays, the root first.

    The first pair is in the root's zone if that has two hosts. None: no such two hosts exist.
    """
    firsts: dict[str, int] = {}  # relay of each zone
    near: dict[int, Pair] = {}  # by sender, which is such a first one
    far = None
    for relay, (address, zone) in enumerate(zip(addresses, zones, strict=True)):
        first = firsts.setdefault(zone, relay)
        if address != addresses[first]:
            near.setdefault(first, Pair(first, relay))
        if far is None and zone != zones[0] and address != addresses[0]:
            far = Pair(0, relay)
    return near[min(near)] if near else None, far


def links_of(cap: float | None, *, inside: LinkSpeed | None, outside: LinkSpeed | None) -> Links:
    """Return the speed of links, given measured hops within a zone and between zones (None: not measured).

    No relay sends more bytes per second than `cap`, whatever the network allows.
    """
    hop = inside or outside or ASSUMED
    between = math.inf if outside is None else outside.bytes_per_s
    return Links(min(hop.bytes_per_s, cap or math.inf), hop.overhead_s, between)


async def _measure(pair: Pair, hosts: Sequence[str], placement: Placement, keys: RelayKeys) -> LinkSpeed | None:
    sender, receiver = hosts[pair.sender], hosts[pair.receiver]
    ip, way = placement.ip(sender), f"from {placement.ip(sender)} to {placement.ip(receiver)}"
    try:
        async with asyncio.timeout(MEASURE_S):
            port = decode(int, await on_node(sender, free_port, ip))
            where = (ip, str(port), keys.public, keys.secret)
            ends = on_node(sender, send_to_measure, *where), on_node(receiver, receive_to_measure, *where)
            sent, taken = (decode(MeasuredHop, told) for told in await asyncio.gather(*ends))
    except (NoAnswerError, OSError) as error:  # a timeout is one too
        reason = (str(error).strip().splitlines() or [f"no answer in {MEASURE_S:g} s"])[-1]
    else:
        if taken.hop is not None:
            speed, overhead_us = taken.hop.bytes_per_s * 8e-9, taken.hop.overhead_s * 1e6
            log.info("measured %s: %.3g Gbit/s and %.0f us for each chunk", way, speed, overhead_us)
            return taken.hop
        reason = sent.reason or taken.reason
    log.warning("not measured %s, so 10 Gbit/s and 200 us for each chunk are assumed: %s", way, reason)
    return None


class MeasuredHop(msgspec.Struct, frozen=True):
    """Answer of one end of a link measurement: the hop, from the receiving end, or why there is none."""

    hop: LinkSpeed | None = None
    reason: str = ""


def send_to_measure(host: str, port: str, public_key: str, secret_key: str) -> bytes:
    """Send chunks from this host for a measurement; return an encoded `MeasuredHop`."""
    try:
        asyncio.run(send_chunks(host, int(port), RelayKeys(public_key, secret_key)))
    except (MeasurementError, OSError) as error:  # OSError: an event loop finds no free descriptors
        return encode(MeasuredHop(reason=str(error)))
    return encode(MeasuredHop())


def receive_to_measure(host: str, port: str, public_key: str, secret_key: str) -> bytes:
    """Receive chunks on this host for a measurement; return an encoded `MeasuredHop`."""
    try:
        hop = asyncio.run(measure_link(f"tcp://{host}:{port}", RelayKeys(public_key, secret_key)))
    except (MeasurementError, OSError) as error:  # as above
        return encode(MeasuredHop(reason=str(error)))
    return encode(MeasuredHop(hop))
