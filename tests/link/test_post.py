"""Two ends of a post: what waits for a frame is woken by it, whatever is sent meanwhile."""

import asyncio
import time
from contextlib import contextmanager

import pytest

from laminar_py.relay import sockets
from laminar_py.relay.sockets import PeerClient, PeerServer, generate_keys, peer_sockets

KEYS = generate_keys()
PATIENCE_S = 10.0


@contextmanager
def ends():
    """A post, and a peer of it."""
    post, wire = PeerServer(KEYS, "127.0.0.1"), peer_sockets(KEYS)
    peer = PeerClient(wire, post.endpoint, "me")
    try:
        yield post, peer
    finally:
        peer.close()
        wire.close()
        post.close()


async def met(post, peer):
    """Once both ends know each other."""
    while not peer.send(b"hello"):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert await post.wait(PATIENCE_S)
    assert post.drain(1)[0][0] == b"me"


async def test_a_frame_that_came_just_before_a_send_is_received_at_once():
    async with asyncio.timeout(PATIENCE_S):
        with ends() as (post, peer):
            await met(post, peer)
            received = asyncio.create_task(peer.receive())
            await asyncio.sleep(0.05)
            assert post.send(b"me", b"order")
            time.sleep(0.1)  # noqa: ASYNC251 (the frame comes while the process is busy)
            assert peer.send(b"report")
            assert bytes(await received) == b"order"


async def test_a_frame_that_came_just_before_a_send_ends_the_wait_at_once():
    async with asyncio.timeout(PATIENCE_S):
        with ends() as (post, peer):
            await met(post, peer)
            came = asyncio.create_task(post.wait(100 * PATIENCE_S))
            await asyncio.sleep(0.05)
            assert peer.send(b"report")
            time.sleep(0.1)  # noqa: ASYNC251
            assert post.send(b"me", b"order")
            assert await came


async def test_a_frame_that_would_end_its_connection_is_not_sent(monkeypatch):
    monkeypatch.setattr(sockets, "MAX_FRAME_BYTES", 10_000)
    async with asyncio.timeout(PATIENCE_S):
        with ends() as (post, peer):
            await met(post, peer)
            with pytest.raises(AssertionError, match="a frame of 10001 bytes"):
                peer.send(bytes(10_001))
            assert peer.send(bytes(10_000))


async def test_a_post_to_which_much_comes_leaves_other_work_its_turn():
    async with asyncio.timeout(PATIENCE_S):
        with ends() as (post, peer):
            await met(post, peer)
            for _ in range(2000):
                post.send(b"me", b"order")
            await asyncio.sleep(0.2)
            turns = []
            counting = asyncio.create_task(_count(turns))
            for _ in range(2000):
                await peer.receive()
            counting.cancel()
            assert len(turns) >= 1000


async def _count(turns):
    while True:
        turns.append(1)
        await asyncio.sleep(0)
