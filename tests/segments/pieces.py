"""Pieces of these tests, and stores on a thread of their own."""

import asyncio
import os
import threading
from contextlib import contextmanager

import numpy as np

from laminar_py.ledger.segments.store import PieceStore, StoreLimits, listen
from laminar_py.records.pieces import Piece
from laminar_py.records.spans import Span

KEY = bytes(range(32))
PATIENCE_S = 60.0


def make_piece(id="g0.0", *, start=0, tokens=5, epoch=1, version=7, **given):
    """Tokens [start, start + tokens) with numbers that tell their places."""
    places = np.arange(start, start + tokens)
    return Piece(
        trajectory_id=id,
        epoch=epoch,
        start=start,
        spans=(Span(version, start, start + tokens),) if tokens else (),
        ids=places.astype("<i4").tobytes(),
        logprobs=(-places).astype("<f4").tobytes(),
        **given,
    )


def random_piece(id="g0.0", *, tokens):
    """Tokens whose bytes nobody guesses."""
    return Piece(
        trajectory_id=id,
        epoch=1,
        start=0,
        spans=(Span(7, 0, tokens),),
        ids=os.urandom(4 * tokens),
        logprobs=os.urandom(4 * tokens),
    )


class ThreadStore:
    """A store in an event loop of its own, beside the clients of a test."""

    def __init__(self, folder, *, key=KEY, limits=None, port=0):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._store = self._do(self._start(folder, key, limits or StoreLimits(), port))
        self.address = self._store.address
        self.port = int(self.address.rpartition(":")[2])

    def _do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    async def _start(self, folder, key, limits, port):
        store = PieceStore(folder, key=key, limits=limits)
        await store.start(await listen(port=port, patience_s=PATIENCE_S))
        return store

    def close(self):
        self._do(self._store.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()


@contextmanager
def served(folder, **given):
    """A store of that folder."""
    store = ThreadStore(folder, **given)
    try:
        yield store
    finally:
        store.close()
