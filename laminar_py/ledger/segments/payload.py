"""Responses as arrays, joined from their pieces. Readers of tokens call it. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.credit import RoleCredit
from laminar_py.records.pieces import (
    Piece,
    RoutedExperts,
    SamplingMask,
    join_experts,
    join_masks,
    unpack_experts,
    unpack_mask,
)
from laminar_py.records.spans import Span, replace_spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A whole response, e.g. of version 7: `Payload(ids=ids, logprobs=logprobs, spans=(Span(7, 0, 41),))`."""

    ids: IntArray  # [L]
    logprobs: FloatArray  # [L]
    spans: tuple[Span, ...]  # cover [0, L); neighbours differ
    sampling_mask: SamplingMask | None = None  # L rows; an empty row: the whole vocabulary
    routed_experts: RoutedExperts | None = None  # from position 0 on
    reward: float | None = None  # of the environment that ended the trajectory
    roles: tuple[RoleCredit, ...] = ()  # rewards by role, if the environment gave any


def join(pieces: Iterable[Piece], *, start: int = 0) -> Payload:
    """Join pieces of one trajectory, in order, from token `start` on.

    Raises `ValueError` for a gap, and for a piece whose tokens and log-probabilities differ in number.
    """
    ids: list[bytes] = []
    logprobs: list[bytes] = []
    spans: tuple[Span, ...] = ()
    masks: list[SamplingMask] = []
    experts: list[RoutedExperts] = []
    length, masked, reward, roles = start, False, None, tuple[RoleCredit, ...]()
    for piece in pieces:
        if piece.start != length:
            raise ValueError(f"tokens [{length}, {piece.start}) are missing or stored twice")
        if len(piece.ids) != len(piece.logprobs):
            raise ValueError(f"the piece from token {length} on has {len(piece.logprobs)} bytes of logprobs")
        ids.append(piece.ids)
        logprobs.append(piece.logprobs)
        spans = replace_spans(spans, piece.spans)
        masked = masked or piece.mask is not None
        masks.append(_mask_of(piece))
        length = piece.end
        reward, roles = piece.reward, piece.roles
        if piece.experts is not None:
            experts.append(unpack_experts(piece.experts))
    return Payload(
        ids=np.frombuffer(b"".join(ids), np.int32),
        logprobs=np.frombuffer(b"".join(logprobs), np.float32),
        spans=spans,
        sampling_mask=join_masks(masks) if masked else None,
        routed_experts=join_experts(experts) if experts else None,
        reward=reward,
        roles=roles,
    )


def _mask_of(piece: Piece) -> SamplingMask:
    """Return the mask of a piece; without one, its tokens were drawn from the whole vocabulary."""
    if piece.mask is None:
        return SamplingMask(np.zeros(piece.end - piece.start, np.int32), np.empty(0, np.int32))
    return unpack_mask(piece.mask)
