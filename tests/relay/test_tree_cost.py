"""The cost model: against a simulated broadcast, its limits, and the chunks that it chooses."""

import heapq
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_lab.broadcast import Broadcast, Links, arrivals_s
from laminar_py.relay.tree import (
    LARGEST_CHUNK_BYTES,
    PAGE_BYTES,
    SMALLEST_CHUNK_BYTES,
    Topology,
    choose_chunk_bytes,
    grow_tree,
    versions_at_peak,
)

MIB = 2**20
TREES = st.builds(
    lambda num_nodes, fanout: grow_tree(num_nodes, fanout=fanout), st.integers(1, 40), st.integers(1, 8)
)
LINKS = st.builds(Links, st.floats(5e7, 5e10), st.floats(0, 1e-2))
SIZES = st.integers(64, 4096).map(lambda pages: pages * PAGE_BYTES)


def best_chunk(tree: Topology, broadcast: Broadcast, links: Links) -> int:
    return choose_chunk_bytes(
        tree, broadcast.num_bytes, bytes_per_s=links.bytes_per_s, overhead_s=links.overhead_s
    )


def broadcast_s(tree: Topology, broadcast: Broadcast, links: Links, *, chunk_bytes: int) -> float:
    """Seconds until the last receiver has all."""
    return max(arrivals_s(tree, broadcast, links, chunk_bytes=chunk_bytes))


def simulate(tree: Topology, broadcast: Broadcast, links: Links, chunk_bytes: int) -> float:
    """Events of a broadcast in the order of time; an uplink carries a chunk at a time, first come first served."""
    chunks = [min(chunk_bytes, broadcast.num_bytes - at) for at in range(0, broadcast.num_bytes, chunk_bytes)]
    ticket = count()
    arrivals = [(0.0, next(ticket), 0, chunk) for chunk in range(len(chunks))]
    free_at = [0.0] * tree.num_nodes
    now = 0.0
    while arrivals:
        now, _, node, chunk = heapq.heappop(arrivals)
        for child in tree.children(node):
            took = links.overhead_s + chunks[chunk] * broadcast.wire_share / links.bytes_per_s
            free_at[node] = max(now, free_at[node]) + took
            heapq.heappush(arrivals, (free_at[node], next(ticket), child, chunk))
    return now


@settings(deadline=None)
@given(TREES, LINKS, SIZES, st.integers(1, 40), st.sampled_from([1.0, 0.011]))
def test_a_broadcast_of_equal_chunks_takes_what_the_model_says(
    tree: Topology, links: Links, chunk_bytes: int, num_chunks: int, share: float
) -> None:
    broadcast = Broadcast(num_chunks * chunk_bytes, share)
    told = broadcast_s(tree, broadcast, links, chunk_bytes=chunk_bytes)
    assert told == pytest.approx(simulate(tree, broadcast, links, chunk_bytes), rel=1e-6)


@settings(deadline=None)
@given(TREES, LINKS, SIZES, st.integers(1, 40))
def test_no_child_has_a_version_before_its_parent(
    tree: Topology, links: Links, chunk_bytes: int, num_chunks: int
) -> None:
    arrivals = arrivals_s(tree, Broadcast(num_chunks * chunk_bytes), links, chunk_bytes=chunk_bytes)
    assert arrivals[0] == 0.0
    assert all(arrivals[parent] <= arrivals[node] for node, parent in enumerate(tree.parents[1:], 1))


@settings(deadline=None)
@given(TREES, LINKS, SIZES, st.integers(1, 60), st.floats(0, 0.999))
def test_a_shorter_last_chunk_makes_the_model_no_more_than_cautious(
    tree: Topology, links: Links, chunk_bytes: int, num_chunks: int, cut: float
) -> None:
    broadcast = Broadcast(int((num_chunks - cut) * chunk_bytes))
    took = simulate(tree, broadcast, links, chunk_bytes)
    told = broadcast_s(tree, broadcast, links, chunk_bytes=chunk_bytes)
    one_chunk = broadcast_s(tree, Broadcast(chunk_bytes), links, chunk_bytes=chunk_bytes)
    assert took * (1 - 1e-9) <= told <= (took + one_chunk) * (1 + 1e-9)


@given(st.integers(2, 300), st.integers(1, 10**11), st.floats(1e7, 5e10), st.floats(0, 1e-2))
def test_a_chain_takes_p_plus_k_minus_1_chunks(
    num_nodes: int, num_bytes: int, speed: float, overhead_s: float
) -> None:
    num_chunks = -(-num_bytes // MIB)
    tree, broadcast = grow_tree(num_nodes, fanout=1), Broadcast(num_chunks * MIB)
    told = broadcast_s(tree, broadcast, Links(speed, overhead_s), chunk_bytes=MIB)
    assert told == pytest.approx((num_nodes - 1 + num_chunks - 1) * (overhead_s + MIB / speed))


@given(st.integers(2, 300), st.floats(1e8, 5e10))
def test_a_chain_tends_to_one_pass_through_a_link(num_nodes: int, speed: float) -> None:
    links = Links(speed, overhead_s=0.01 * LARGEST_CHUNK_BYTES / speed)
    tree, broadcast = grow_tree(num_nodes, fanout=1), Broadcast(200 * num_nodes * LARGEST_CHUNK_BYTES)
    chunk_bytes = best_chunk(tree, broadcast, links)
    seconds = broadcast_s(tree, broadcast, links, chunk_bytes=chunk_bytes)
    assert 1 <= seconds / (broadcast.num_bytes / speed) <= 1.03


@pytest.mark.parametrize(("num_nodes", "sends"), [(2, 1), (3, 2), (4, 2), (6, 3), (7, 4), (15, 6), (31, 8)])
def test_a_binary_tree_waits_for_the_node_whose_way_has_most_sends(num_nodes: int, sends: int) -> None:
    tree = grow_tree(num_nodes, fanout=2)
    told = broadcast_s(tree, Broadcast(MIB), Links(1e9, 0), chunk_bytes=MIB)
    assert told == pytest.approx(sends * MIB / 1e9)


@given(TREES, LINKS, st.integers(1, 10**11))
def test_the_chosen_chunk_is_of_whole_pages_within_bounds(tree: Topology, links: Links, num_bytes: int) -> None:
    best = best_chunk(tree, Broadcast(num_bytes), links)
    assert best % PAGE_BYTES == 0
    assert SMALLEST_CHUNK_BYTES <= best <= LARGEST_CHUNK_BYTES


@pytest.mark.parametrize(
    ("overhead_s", "chosen"), [(0, SMALLEST_CHUNK_BYTES), (1e-5, 10**6), (1e-3, LARGEST_CHUNK_BYTES)]
)
def test_on_one_hop_a_chunk_is_a_hundred_overheads_long(overhead_s: float, chosen: int) -> None:
    best = best_chunk(grow_tree(2, fanout=1), Broadcast(10**9), Links(1e9, overhead_s))
    assert best == pytest.approx(chosen, abs=PAGE_BYTES)


@given(TREES, LINKS, st.integers(10**6, 10**11))
def test_no_chunk_size_is_much_faster_than_the_chosen(tree: Topology, links: Links, num_bytes: int) -> None:
    broadcast = Broadcast(num_bytes)
    chosen = best_chunk(tree, broadcast, links)
    ends = range(SMALLEST_CHUNK_BYTES, LARGEST_CHUNK_BYTES + 1, 64 * PAGE_BYTES)
    least = min(broadcast_s(tree, broadcast, links, chunk_bytes=size) for size in ends)
    fanout = max(len(tree.children(node)) for node in tree.downward)
    pace_s = fanout * (links.overhead_s + chosen / links.bytes_per_s)
    assert broadcast_s(tree, broadcast, links, chunk_bytes=chosen) <= least * 1.02 + pace_s


@given(st.integers(3, 200), st.integers(2, 1000), st.floats(1e8, 5e10), st.floats(2**19, 2**23))
def test_the_best_chunk_of_a_chain_is_that_of_the_formula(
    num_nodes: int, num_chunks: int, speed: float, size: float
) -> None:
    hops, num_bytes = num_nodes - 1, round(num_chunks * size)
    overhead_s = (hops - 1) * num_bytes / (num_chunks**2 * speed)  # what k* = sqrt((p - 1) M / (a W)) says
    least = (hops + num_chunks - 1) * (overhead_s + num_bytes / num_chunks / speed)
    tree, broadcast, links = grow_tree(num_nodes, fanout=1), Broadcast(num_bytes), Links(speed, overhead_s)
    chunk_bytes = best_chunk(tree, broadcast, links)
    seconds = broadcast_s(tree, broadcast, links, chunk_bytes=chunk_bytes)
    assert least * (1 - 1e-9) <= seconds <= least * 1.02 + overhead_s + chunk_bytes / speed


def test_a_delta_is_as_fast_as_its_slowest_stage() -> None:
    delta = Broadcast(1000 * MIB, 0.01, encode_bytes_per_s=2e9, apply_bytes_per_s=5e9)
    told = broadcast_s(grow_tree(8, fanout=1), delta, Links(1e9, 0), chunk_bytes=MIB)
    first = MIB / 2e9 + MIB / 5e9 + 7 * 0.01 * MIB / 1e9
    assert told == pytest.approx(first + 999 * MIB / 2e9)


@pytest.mark.parametrize(("nodes", "replicas", "versions"), [(1, 0, 4), (1, 2, 6), (3, 4, 16)])
def test_each_node_keeps_takes_in_and_passes_on_versions_and_each_replica_may_hold_an_older_one(
    nodes: int, replicas: int, versions: int
) -> None:
    assert versions_at_peak(keep_versions=2, num_replicas=replicas, num_nodes=nodes) == versions
