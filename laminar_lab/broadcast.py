"""How long a version takes through a relay tree, by formula. `step_time` and `docs/scale.md` use it. Pure.

A node sends one chunk at a time, to its children in turn, each as soon as it has arrived. A send takes
`overhead_s + bytes / bytes_per_s`. So the chunks of a version follow each other at the pace of the slowest node
above a receiver: a receiver waits for its first chunk, and one such pace for each further chunk. In a chain of `p`
hops that is `(p + k - 1)(a + M / (k W))`. The model is exact where all chunks have one size, and at most one pace
too long where the last chunk is shorter.
"""

import math
from dataclasses import dataclass

from laminar_py.relay import Topology


@dataclass(frozen=True, slots=True)
class Links:
    """Speed of the network, e.g. 100 Gb/s a host: `Links(12.5e9, 2e-4)`."""

    bytes_per_s: float  # from one host to another
    overhead_s: float  # per chunk and hop, whatever its size


@dataclass(frozen=True, slots=True)
class Broadcast:
    """A version to send, e.g. 15 GB as a delta of 1.1 %: `Broadcast(15 * 10**9, 0.011, 1.5e9, 5e9)`.

    A delta has the chunks of the full version, each shorter on the wire.
    """

    num_bytes: int  # of the full version
    wire_share: float = 1.0  # share of `num_bytes` that travels
    encode_bytes_per_s: float = math.inf  # of the full version, at the root
    apply_bytes_per_s: float = math.inf  # of the full version, at each receiver, beside its forwarding


def arrivals_s(tree: Topology, broadcast: Broadcast, links: Links, *, chunk_bytes: int) -> list[float]:
    """[N] seconds until each node of a tree has all of a version; 0 for the root."""
    chunk = min(chunk_bytes, broadcast.num_bytes)
    send_s = links.overhead_s + chunk * broadcast.wire_share / links.bytes_per_s
    encode_s, apply_s = chunk / broadcast.encode_bytes_per_s, chunk / broadcast.apply_bytes_per_s
    sends = [0] * tree.num_nodes  # before a node has its first chunk
    pace_s = [max(encode_s, apply_s)] * tree.num_nodes
    for node in tree.downward:
        children = tree.children(node)
        for turn, child in enumerate(children, 1):
            sends[child] = sends[node] + turn
            pace_s[child] = max(pace_s[node], len(children) * send_s)
    further = -(-broadcast.num_bytes // chunk) - 1
    first_s = [number * send_s + encode_s + apply_s for number in sends]
    return [0.0, *(first + further * pace for first, pace in zip(first_s[1:], pace_s[1:], strict=True))]
