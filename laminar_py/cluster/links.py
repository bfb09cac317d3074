"""What the network between a run's hosts gives: as the config says, measured where it does not, or assumed.

Asked by the owner of the relays when a run starts. Invariant: what the config gives wins, and a probe that fails
costs a line in the log and nothing else.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from ray.exceptions import RayError

from laminar_py.cluster.placement import Placement
from laminar_py.cluster.ray_cluster import free_port, on_node
from laminar_py.config.relay import RelayConfig, TopologyKind
from laminar_py.records.codec import decode, encode
from laminar_py.relay.planning.cost import Links
from laminar_py.relay.planning.probe import Hop, ProbeError, measure_hop, send_chunks
from laminar_py.relay.wire.transport import RelayKeys

log = logging.getLogger(__name__)

ASSUMED = Hop(1.25e9, 200e-6)  # of hosts that nobody measured: 10 Gb/s
FEWEST_NODES = 3  # of a tree that can have more than one shape
PROBE_S = 90.0  # with the start of a process on each of the two hosts


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
    if len(hosts) >= FEWEST_NODES and _is_open(relay):
        if near is not None and None in (relay.link_gbit_per_s, relay.overhead_us):
            inside = await _measure(near, hosts, placement, keys)
        if far is not None and (near is None or relay.zone_gbit_per_s is None):
            outside = await _measure(far, hosts, placement, keys)
    return links_of(relay, inside=inside, outside=outside)


def pairs(addresses: Sequence[str], zones: Sequence[str]) -> tuple[Pair | None, Pair | None]:
    """Whose hops tell of a zone's inside, and of the way between zones; [N] of each relay, the root first.

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


def links_of(relay: RelayConfig, *, inside: Hop | None, outside: Hop | None) -> Links:
    """The network in bytes and seconds, where these hops were measured within a zone and between two.

    No relay sends more than its cap, whatever the network would give.
    """
    hop = inside or outside or ASSUMED
    bytes_per_s = hop.bytes_per_s if relay.link_gbit_per_s is None else relay.link_gbit_per_s * 1e9 / 8
    bytes_per_s = min(bytes_per_s, relay.max_bytes_per_s or math.inf)
    overhead_s = hop.overhead_s if relay.overhead_us is None else relay.overhead_us * 1e-6
    between = math.inf if outside is None else outside.bytes_per_s
    return Links(
        bytes_per_s, overhead_s, between if relay.zone_gbit_per_s is None else relay.zone_gbit_per_s * 1e9 / 8
    )


def _is_open(relay: RelayConfig) -> bool:
    """Whether anything is left to be chosen."""
    return relay.topology is TopologyKind.AUTO or relay.chunk_bytes is None


async def _measure(pair: Pair, hosts: Sequence[str], placement: Placement, keys: RelayKeys) -> Hop | None:
    sender, receiver = hosts[pair.sender], hosts[pair.receiver]
    ip, way = placement.ip(sender), f"from {placement.ip(sender)} to {placement.ip(receiver)}"
    try:
        async with asyncio.timeout(PROBE_S):
            port = decode(int, await on_node(sender, free_port, ip))
            where = (ip, str(port), keys.public, keys.secret)
            ends = on_node(sender, send_probe, *where), on_node(receiver, take_probe, *where)
            sent, taken = (decode(Told, told) for told in await asyncio.gather(*ends))
    except (RayError, OSError) as error:  # a timeout is one too
        reason = (str(error).strip().splitlines() or [f"no answer in {PROBE_S:g} s"])[-1]
    else:
        if taken.hop is not None:
            speed, overhead_us = taken.hop.bytes_per_s * 8e-9, taken.hop.overhead_s * 1e6
            log.info("measured %s: %.3g Gbit/s and %.0f us for each chunk", way, speed, overhead_us)
            return taken.hop
        reason = sent.reason or taken.reason
    log.warning("not measured %s, so 10 Gbit/s and 200 us for each chunk are assumed: %s", way, reason)
    return None


class Told(msgspec.Struct, frozen=True):
    """What an end of a probe answers: the receiving one the hop, either one why there is none."""

    hop: Hop | None = None
    reason: str = ""


def send_probe(host: str, port: str, public_key: str, secret_key: str) -> bytes:
    """Be the sending end, on the host that this runs on; `Told`."""
    try:
        asyncio.run(send_chunks(host, int(port), RelayKeys(public_key, secret_key)))
    except (ProbeError, OSError) as error:  # OSError: no files are left for an event loop
        return encode(Told(reason=str(error)))
    return encode(Told())


def take_probe(host: str, port: str, public_key: str, secret_key: str) -> bytes:
    """Be the receiving end, on the host that this runs on; `Told`."""
    try:
        hop = asyncio.run(measure_hop(f"tcp://{host}:{port}", RelayKeys(public_key, secret_key)))
    except (ProbeError, OSError) as error:  # as above
        return encode(Told(reason=str(error)))
    return encode(Told(hop))
