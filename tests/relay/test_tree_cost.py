"""The cost model: against a simulated broadcast, its limits, and what `choose` makes of it."""

import heapq
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.config.cluster import TopologyKind
from laminar_py.relay.tree import (
    ALL,
    CHUNK_SIZES,
    LARGEST_CHUNK_BYTES,
    NEAR_BEST,
    PAGE_BYTES,
    SMALLEST_CHUNK_BYTES,
    Broadcast,
    Links,
    Shape,
    Topology,
    arrivals_s,
    broadcast_s,
    choose_tree,
    fastest_shape,
    grow_tree,
    shape_of,
    versions_at_peak,
    with_best_chunk,
)
from tests.depth import examples

MIB = 2**20
FANOUTS = st.integers(1, 8) | st.just(ALL)
SHAPES = st.builds(
    lambda members, heads, short: Shape(members, heads=heads, short=short), FANOUTS, FANOUTS, st.booleans()
)
ZONES = st.lists(st.integers(1, 8), min_size=1, max_size=5).map(
    lambda sizes: [str(zone) for zone, size in enumerate(sizes) for _ in range(size)]
)
LINKS = st.builds(
    Links, st.floats(5e7, 5e10), st.floats(0, 1e-2), zone_bytes_per_s=st.floats(1e7, 5e10) | st.just(float("inf"))
)
SIZES = st.sampled_from(CHUNK_SIZES)


def simulate(tree: Topology, zones: list[str], broadcast: Broadcast, links: Links, chunk_bytes: int) -> float:
    """Events of a broadcast in the order of time; an uplink carries a chunk at a time, first come first served."""
    chunks = [min(chunk_bytes, broadcast.num_bytes - at) for at in range(0, broadcast.num_bytes, chunk_bytes)]
    ticket = count()
    arrivals = [(0.0, next(ticket), 0, chunk) for chunk in range(len(chunks))]
    free_at = [0.0] * tree.num_nodes
    now = 0.0
    while arrivals:
        now, _, node, chunk = heapq.heappop(arrivals)
        for child in tree.children(node):
            far = zones[child] != zones[node]
            speed = min(links.bytes_per_s, links.zone_bytes_per_s) if far else links.bytes_per_s
            took = links.overhead_s + chunks[chunk] * broadcast.wire_share / speed
            free_at[node] = max(now, free_at[node]) + took
            heapq.heappush(arrivals, (free_at[node], next(ticket), child, chunk))
    return now


@settings(deadline=None)
@given(SHAPES, ZONES, LINKS, SIZES, st.integers(1, 40), st.sampled_from([1.0, 0.011]))
def test_a_broadcast_of_equal_chunks_takes_what_the_model_says(
    shape: Shape, zones: list[str], links: Links, chunk_bytes: int, num_chunks: int, share: float
) -> None:
    broadcast = Broadcast(num_chunks * chunk_bytes, share)
    tree = grow_tree(shape, zones)
    told = broadcast_s(tree, zones, broadcast, links, chunk_bytes=chunk_bytes)
    assert told == pytest.approx(simulate(tree, zones, broadcast, links, chunk_bytes), rel=1e-6)


@settings(deadline=None)
@given(SHAPES, ZONES, LINKS, SIZES, st.integers(1, 40))
def test_the_last_of_all_arrivals_is_the_time_of_the_broadcast_and_no_child_is_before_its_parent(
    shape: Shape, zones: list[str], links: Links, chunk_bytes: int, num_chunks: int
) -> None:
    tree, broadcast = grow_tree(shape, zones), Broadcast(num_chunks * chunk_bytes)
    arrivals = arrivals_s(tree, zones, broadcast, links, chunk_bytes=chunk_bytes)
    assert max(arrivals) == broadcast_s(tree, zones, broadcast, links, chunk_bytes=chunk_bytes)
    assert arrivals[0] == 0.0
    assert all(arrivals[parent] <= arrivals[node] for node, parent in enumerate(tree.parents[1:], 1))


@settings(deadline=None)
@given(SHAPES, ZONES, LINKS, SIZES, st.integers(1, 60), st.floats(0, 0.999))
def test_a_shorter_last_chunk_makes_the_model_no_more_than_cautious(
    shape: Shape, zones: list[str], links: Links, chunk_bytes: int, num_chunks: int, cut: float
) -> None:
    tree, broadcast = grow_tree(shape, zones), Broadcast(int((num_chunks - cut) * chunk_bytes))
    took = simulate(tree, zones, broadcast, links, chunk_bytes)
    told = broadcast_s(tree, zones, broadcast, links, chunk_bytes=chunk_bytes)
    one_chunk = broadcast_s(tree, zones, Broadcast(chunk_bytes), links, chunk_bytes=chunk_bytes)
    assert took * (1 - 1e-9) <= told <= (took + one_chunk) * (1 + 1e-9)
    assert told <= 1.05 * took or num_chunks < 25


@given(SHAPES, ZONES, LINKS, st.integers(1, 10**9), st.integers(1, 10**9))
def test_more_bytes_take_no_less_time_but_for_what_a_smaller_chunk_may_cost(
    shape: Shape, zones: list[str], links: Links, num_bytes: int, more: int
) -> None:
    less, greater = (
        with_best_chunk(shape, zones, Broadcast(size), links).seconds for size in (num_bytes, num_bytes + more)
    )
    assert less <= NEAR_BEST * greater


@given(st.integers(2, 300), st.integers(1, 10**11), st.floats(1e7, 5e10), st.floats(0, 1e-2))
def test_a_chain_takes_p_plus_k_minus_1_chunks(
    num_nodes: int, num_bytes: int, speed: float, overhead_s: float
) -> None:
    zones, links = [""] * num_nodes, Links(speed, overhead_s)
    num_chunks = -(-num_bytes // MIB)
    broadcast = Broadcast(num_chunks * MIB)
    told = broadcast_s(grow_tree(Shape(1), zones), zones, broadcast, links, chunk_bytes=MIB)
    assert told == pytest.approx((num_nodes - 1 + num_chunks - 1) * (overhead_s + MIB / speed))


@given(st.integers(2, 300), st.floats(1e8, 5e10))
def test_a_chain_tends_to_one_pass_through_a_link(num_nodes: int, speed: float) -> None:
    links = Links(speed, overhead_s=0.01 * LARGEST_CHUNK_BYTES / speed)
    broadcast = Broadcast(200 * num_nodes * LARGEST_CHUNK_BYTES)
    chain = with_best_chunk(Shape(1), [""] * num_nodes, broadcast, links)
    assert 1 <= chain.seconds / (broadcast.num_bytes / speed) <= 1.02 * NEAR_BEST


@given(st.integers(2, 300), st.integers(10**8, 10**10))
def test_a_star_sends_everything_to_each(num_nodes: int, num_bytes: int) -> None:
    star = with_best_chunk(Shape(ALL), [""] * num_nodes, Broadcast(num_bytes), Links(1e9, overhead_s=0))
    assert star.seconds == pytest.approx((num_nodes - 1) * num_bytes / 1e9, rel=0.003)


@pytest.mark.parametrize(("num_nodes", "sends"), [(2, 1), (3, 2), (4, 2), (6, 3), (7, 4), (15, 6), (31, 8)])
def test_a_binary_tree_waits_for_the_node_whose_way_has_most_sends(num_nodes: int, sends: int) -> None:
    zones = [""] * num_nodes
    tree = grow_tree(Shape(2), zones)
    told = broadcast_s(tree, zones, Broadcast(MIB), Links(1e9, 0), chunk_bytes=MIB)
    assert told == pytest.approx(sends * MIB / 1e9)


@given(ZONES, LINKS, st.integers(1, 10**11))
@settings(deadline=None, max_examples=examples(25))
def test_auto_is_never_slower_than_chain_star_or_binary_tree(
    zones: list[str], links: Links, num_bytes: int
) -> None:
    broadcast = Broadcast(num_bytes)
    chosen = fastest_shape(zones, broadcast, links)
    for kind in (TopologyKind.CHAIN, TopologyKind.STAR, TopologyKind.KARY):
        assert chosen.seconds <= with_best_chunk(shape_of(kind, fanout=2), zones, broadcast, links).seconds


def test_of_equally_fast_shapes_auto_takes_the_flattest() -> None:
    chosen = fastest_shape([""] * 3, Broadcast(MIB), Links(1e9, overhead_s=1e3))  # any is two sends of one chunk
    assert grow_tree(chosen.shape, [""] * 3).depth == 1


def test_auto_pipelines_what_is_large_and_branches_for_what_is_small() -> None:
    zones, links = [""] * 64, Links(1e9, overhead_s=1e-4)
    large, small = (
        fastest_shape(zones, Broadcast(num_bytes), links).shape.members for num_bytes in (10**11, 10**5)
    )
    assert large == 1
    assert 1 < small < ALL


def test_a_slow_link_between_zones_costs_one_pass_and_not_one_per_host() -> None:
    zones = ["home"] * 16 + ["away"] * 16
    links = Links(1e10, 1e-4, zone_bytes_per_s=1e9)
    assert fastest_shape(zones, Broadcast(10**11), links).seconds < 1.05 * 10**11 / 1e9
    assert fastest_shape([""] * 32, Broadcast(10**11), Links(1e9, 1e-4)).seconds >= 10**11 / 1e9


@given(SHAPES, ZONES, LINKS, st.integers(1, 10**11))
def test_the_best_chunk_is_of_whole_pages_within_bounds(
    shape: Shape, zones: list[str], links: Links, num_bytes: int
) -> None:
    best = with_best_chunk(shape, zones, Broadcast(num_bytes), links).chunk_bytes
    assert best % PAGE_BYTES == 0
    assert SMALLEST_CHUNK_BYTES <= best <= LARGEST_CHUNK_BYTES
    assert (CHUNK_SIZES[0], CHUNK_SIZES[-1]) == (SMALLEST_CHUNK_BYTES, LARGEST_CHUNK_BYTES)


def test_of_chunks_that_are_nearly_as_fast_the_smallest_is_taken() -> None:
    free = Links(1e9, overhead_s=0)  # one hop: any size takes as long
    assert with_best_chunk(Shape(1), [""] * 2, Broadcast(10**9), free).chunk_bytes == SMALLEST_CHUNK_BYTES


@given(st.integers(3, 200), st.integers(2, 1000), st.floats(1e8, 5e10), st.floats(2**19, 2**23))
def test_the_best_chunk_of_a_chain_is_that_of_the_formula(
    num_nodes: int, num_chunks: int, speed: float, chunk_bytes: float
) -> None:
    hops, num_bytes = num_nodes - 1, round(num_chunks * chunk_bytes)
    overhead_s = (hops - 1) * num_bytes / (num_chunks**2 * speed)  # what k* = sqrt((p - 1) M / (a W)) says
    least = (hops + num_chunks - 1) * (overhead_s + num_bytes / num_chunks / speed)
    chain = with_best_chunk(Shape(1), [""] * num_nodes, Broadcast(num_bytes), Links(speed, overhead_s))
    most = least * 1.01 * NEAR_BEST + overhead_s + chain.chunk_bytes / speed
    assert least * (1 - 1e-9) <= chain.seconds <= most


def test_a_delta_is_as_fast_as_its_slowest_stage() -> None:
    zones, links = [""] * 8, Links(1e9, 0)
    delta = Broadcast(1000 * MIB, 0.01, encode_bytes_per_s=2e9, apply_bytes_per_s=5e9)
    told = broadcast_s(grow_tree(Shape(1), zones), zones, delta, links, chunk_bytes=MIB)
    first = MIB / 2e9 + MIB / 5e9 + 7 * 0.01 * MIB / 1e9
    assert told == pytest.approx(first + 999 * MIB / 2e9)


def test_a_lone_root_waits_for_nothing() -> None:
    assert fastest_shape(["rack-1"], Broadcast(10**9), Links(1e9, 1e-4)).seconds == 0


@pytest.mark.parametrize("kind", [TopologyKind.STAR, TopologyKind.CHAIN, TopologyKind.KARY])
def test_a_named_topology_is_taken_as_it_is(kind: TopologyKind) -> None:
    settled = choose_tree(
        kind, fanout=3, zones=["a", "a", "b"], broadcast=Broadcast(10**9), links=Links(1e9, 1e-4)
    )
    assert settled.shape == shape_of(kind, fanout=3)


@pytest.mark.parametrize(("nodes", "replicas", "versions"), [(1, 0, 4), (1, 2, 6), (3, 4, 16)])
def test_each_node_keeps_takes_in_and_passes_on_versions_and_each_replica_may_hold_an_older_one(
    nodes: int, replicas: int, versions: int
) -> None:
    assert versions_at_peak(keep_versions=2, num_replicas=replicas, num_nodes=nodes) == versions
