"""Pieces of these tests."""

import os

import numpy as np

from laminar_py.records.pieces import Piece
from laminar_py.records.spans import Span


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
