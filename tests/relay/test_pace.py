"""The cap on what a node sends its children: exceeded by no more than a chunk, and nothing else is held back."""

import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from laminar_py.relay.downlink import SLACK_S, ChunkQueue, ChunkRequest, Pace
from laminar_py.relay.messages import (
    Announce,
    Chunk,
    Done,
    Fetch,
    Newest,
    Subscribe,
    ToChild,
    VersionComplete,
)
from laminar_py.relay.sockets import Connection
from tests.relay.tree import (
    CHUNK,
    PATIENCE_S,
    ByHand,
    Events,
    Learner,
    chain,
    folder_bytes,
    growing,
    make_node,
    receive,
    running,
    subscriber,
    write_version,
)

A, B = b"child-a", b"child-b"
SLOW = CHUNK / 0.02  # bytes per second


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@given(
    cap=st.floats(1, 1e9),
    sends=st.lists(st.tuples(st.integers(0, 10**7), st.floats(0, 10)), min_size=1, max_size=30),
)
def test_in_no_time_more_than_the_cap_and_one_chunk_is_sent(cap: float, sends: list[tuple[int, float]]) -> None:
    """Each send of some bytes is made when it may be, or later."""
    clock = Clock()
    pace = Pace(cap, now=clock)
    sent: list[tuple[float, int]] = []
    for size, late_s in sends:
        clock.now_s += pace.wait_s + late_s
        pace.spend(size)
        sent.append((clock.now_s, size))
    for first, (began_s, _) in enumerate(sent):
        for last, (ended_s, chunk) in enumerate(sent[first:], first):
            allowed = cap * (ended_s - began_s + SLACK_S) + chunk
            assert sum(size for _, size in sent[first : last + 1]) <= allowed * (1 + 1e-6) + 1e-6 * cap


def test_one_that_always_has_something_sends_at_its_cap_though_its_timer_is_late() -> None:
    clock = Clock()
    pace = Pace(1e6, now=clock)
    num_sent = 0
    while clock.now_s < 110:
        while not pace.wait_s:
            pace.spend(1000)
            num_sent += 1
        clock.now_s += pace.wait_s + 0.7 * SLACK_S
    assert 0.99 * 10_000 <= num_sent <= 1.01 * 10_000


def test_without_a_cap_nothing_waits() -> None:
    pace = Pace(None, now=Clock())
    for _ in range(3):
        pace.spend(10**12)
        assert pace.wait_s == 0


def test_children_take_turns_and_each_gets_its_chunks_as_it_asked(tmp_path: Path) -> None:
    stored, queue = write_version(tmp_path, 1, 20 * CHUNK), ChunkQueue()
    for child, index in [(A, 0), (A, 1), (A, 2), (B, 7), (B, 0), (A, 1)]:  # the last one again
        queue.add_chunk(child, ChunkRequest(stored, 0, index, None))
    taken = [(child, request.index) for child, request in iter_queue(queue)]
    assert taken == [(A, 0), (B, 7), (A, 1), (B, 0), (A, 2)]


def test_what_nobody_wants_any_more_leaves_the_queue(tmp_path: Path) -> None:
    old, new = (write_version(tmp_path, version, 20 * CHUNK) for version in (1, 2))
    queue = ChunkQueue()
    for child in (A, B, b"gone"):
        for stored in (old, new):
            queue.add_chunk(child, ChunkRequest(stored, 0, 3, None))
    queue.drop_child(b"gone")
    queue.drop_version(1, A)
    assert [(child, request.stored.manifest.version) for child, request in iter_queue(queue)] == [
        (A, 2),
        (B, 1),
        (B, 2),
    ]
    queue.add_chunk(A, ChunkRequest(old, 0, 3, None))
    queue.drop_version(1)
    assert not queue


def iter_queue(queue: ChunkQueue) -> list[tuple[bytes, ChunkRequest]]:
    taken = []
    while queue:
        taken.append(queue.next_chunk())
    return taken


async def test_under_a_cap_all_arrives_and_no_faster(tmp_path: Path) -> None:
    """The leaf is behind two senders, so it takes at least as long as one of them needs."""
    events = Events()
    async with (
        growing(tmp_path, chain(3), emit=events, max_bytes_per_s=SLOW) as nodes,
        Learner(tmp_path) as learner,
        running(leaf := subscriber(nodes[2], "replica-0")),
    ):
        await learner.publish(1, num_bytes=25 * CHUNK)
        pulled = await leaf.pull(1)
    assert folder_bytes(Path(pulled.path)) == folder_bytes(tmp_path / "relay-0" / "v1")
    for node in ("relay-1", "relay-2"):
        complete = await events.first(VersionComplete, node=node)
        assert complete.wire_bytes == complete.num_bytes > 20 * CHUNK
        assert complete.wire_bytes <= SLOW * (complete.elapsed_s + SLACK_S) + CHUNK


async def test_two_children_share_the_cap_of_their_parent(tmp_path: Path) -> None:
    write_version(tmp_path / "relay-0", 1, 20 * CHUNK)
    root = make_node(tmp_path, "relay-0", max_bytes_per_s=SLOW)
    async with running(root), ByHand() as hand:
        children = [await hand.child(root.endpoint) for _ in range(2)]
        began_s = time.monotonic()
        for child in children:
            child.send(Fetch(version=1, file=0, first_chunk=0, credits=10))
        for number in range(1, 11):
            for child in children:
                assert (await receive(child, Chunk)).index == number - 1
            passed_s = time.monotonic() - began_s
            assert 2 * number * CHUNK <= SLOW * (passed_s + SLACK_S) + CHUNK


async def test_records_pass_chunks_that_wait_and_an_overtaken_version_leaves_the_queue(tmp_path: Path) -> None:
    clock, rate = Clock(), CHUNK / 0.1
    old = write_version(tmp_path / "relay-0", 1, 20 * CHUNK)
    root = make_node(tmp_path, "relay-0", max_bytes_per_s=rate, now=clock)
    async with running(root), ByHand() as hand:
        child = await hand.child(root.endpoint)
        assert (await receive(child, Announce)).manifest == old.manifest
        child.send(Fetch(version=1, file=0, first_chunk=0, credits=20))
        seen: list[ToChild] = [await receive(child, Chunk)]  # and the clock stands still
        new = write_version(tmp_path / "relay-0", 2, 3 * CHUNK)
        seen += await until(child, Announce)
        for message in (Done(1), Fetch(version=2, file=0, first_chunk=0, credits=3), Subscribe()):
            child.send(message)
        seen += await until(child, Newest)  # the root has read all of it
        for _ in range(3):
            clock.now_s += 0.1
            seen += await until(child, Chunk)
    assert [(one.version, one.index) for one in seen if isinstance(one, Chunk)] == [(1, 0), (2, 0), (2, 1), (2, 2)]
    assert [one.manifest for one in seen if isinstance(one, Announce)] == [new.manifest]


async def until(link: Connection, kind: type[ToChild]) -> list[ToChild]:
    """All that comes up to a record of this kind."""
    seen: list[ToChild] = []
    while not seen or not isinstance(seen[-1], kind):
        message = await link.receive(PATIENCE_S)
        assert isinstance(message, ToChild), f"{message} came, not a {kind.__name__}"
        seen.append(message)
    return seen
