"""Links between a run's hosts: measured, named by `relay.link_gbit_per_s`, or assumed.

Asked by the owner of the relays when a run starts. Invariant: a measurement that fails costs a line in the log and
nothing else.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from laminar_py.config.cluster import RelayConfig
from laminar_py.records.codec import decode, encode
from laminar_py.relay.planning.cost import Links
from laminar_py.relay.planning.link import LinkSpeed, MeasurementError, measure_link, send_chunks
from laminar_py.relay.wire.transport import RelayKeys
from laminar_py.runtime.cluster.backend import free_port, on_node
from laminar_py.runtime.cluster.errors import NoAnswerError
from laminar_py.runtime.cluster.placement import Placement

log = logging.getLogger(__name__)

ASSUMED = LinkSpeed(1.25e9, 200e-6)  # of hosts that nobody measured: 10 Gb/s
FEWEST_NODES = 3  # of a tree that can have more than one shape
MEASURE_S = 90.0  # with the start of a process on each of the two hosts


@dataclass(frozen=True, slots=True)
class Pair:
    """Two relays by number between which a hop is measured: `sender` is nearer to the root."""

    sender: int
    receiver: int


async def find_links(
    relay: RelayConfig, hosts: Sequence[str], zones: Sequence[str], placement: Placement, keys: RelayKeys
) -> Links:
    """The links of a tree whose relays are on these Ray nodes ([N] ids) in these zones ([N] labels)."""
    near, far = pairs([placement.ip(host) for host in hosts], zones)
    inside = outside = None
    if relay.link_gbit_per_s is not None:
        inside = LinkSpeed(relay.link_gbit_per_s * 1e9 / 8, ASSUMED.overhead_s)
    elif len(hosts) >= FEWEST_NODES:
        inside = None if near is None else await _measure(near, hosts, placement, keys)
        outside = None if far is None else await _measure(far, hosts, placement, keys)
    return links_of(relay.max_bytes_per_s, inside=inside, outside=outside)


def pairs(addresses: Sequence[str], zones: Sequence[str]) -> tuple[Pair | None, Pair | None]:
    """Pairs whose hops tell of a zone's inside, and of the way between zones; [N] of each relay, the root first.

    From the root, if its zone has two hosts; None where there are no such two hosts.
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
    """The network in bytes and seconds, where these hops were measured within a zone and between two.

    No relay sends more bytes per second than its `cap`, whatever the network would give.
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
            sent, taken = (decode(Told, told) for told in await asyncio.gather(*ends))
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


class Told(msgspec.Struct, frozen=True):
    """Answer of an end of a link measurement: the receiving one's hop, or why there is none."""

    hop: LinkSpeed | None = None
    reason: str = ""


def send_to_measure(host: str, port: str, public_key: str, secret_key: str) -> bytes:
    """Be the sending end, on the host that this runs on; `Told`."""
    try:
        asyncio.run(send_chunks(host, int(port), RelayKeys(public_key, secret_key)))
    except (MeasurementError, OSError) as error:  # OSError: no files are left for an event loop
        return encode(Told(reason=str(error)))
    return encode(Told())


def receive_to_measure(host: str, port: str, public_key: str, secret_key: str) -> bytes:
    """Be the receiving end, on the host that this runs on; `Told`."""
    try:
        hop = asyncio.run(measure_link(f"tcp://{host}:{port}", RelayKeys(public_key, secret_key)))
    except (MeasurementError, OSError) as error:  # as above
        return encode(Told(reason=str(error)))
    return encode(Told(hop))
