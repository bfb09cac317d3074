"""Pieces of these tests, and stores on a thread of their own."""

import os
from contextlib import contextmanager

import numpy as np

from laminar_py.ledger.segments.store import PieceStore
from laminar_py.ledger.segments.wire import leave_address
from laminar_py.records.pieces import Piece
from laminar_py.records.spans import Span

KEY = bytes(range(32))
STORE = "store-0"
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


class LocalStore(PieceStore):
    """A store in this process, which left its address in its own folder."""

    def __init__(self, folder, *, key=KEY, limits=None):
        super().__init__(folder, key=key, limits=limits)
        self.address = self.start()
        leave_address(folder, STORE, self.address)


@contextmanager
def served(folder, **given):
    """A store of that folder."""
    store = LocalStore(folder, **given)
    try:
        yield store
    finally:
        store.close()
