"""Responses as arrays, joined from the pieces in which they were stored. Called by recovery and the audit."""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.digests import segment_digest
from laminar_py.records.recordings import (
    RoutedExperts,
    SamplingMask,
    join_experts,
    join_masks,
    unpack_experts,
    unpack_mask,
)
from laminar_py.records.spans import decode_spans, merge_spans
from laminar_py.records.trajectory import Span

IDS_AT_A_TIME = 1000  # SQLite bounds the parameters of a statement


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Response tokens [start, start + n) of trajectory number `trajectory`, byte for byte as stored."""

    trajectory: int
    start: int
    spans: str  # JSON, cover [start, start + n)
    ids: bytes  # [n] int32
    logprobs: bytes  # [n] float32
    mask: bytes | None  # packed, of n rows
    experts: bytes | None  # packed, of positions of their own; with them n may be 0
    digest: bytes

    @property
    def num_tokens(self) -> int:
        """n."""
        return len(self.ids) // 4

    @property
    def is_intact(self) -> bool:
        """True if nobody changed it."""
        return self.digest == segment_digest(
            self.trajectory, self.start, self.spans, self.ids, self.logprobs, self.mask, self.experts
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A whole response, e.g. of version 7: `Payload(ids=ids, logprobs=logprobs, spans=(Span(7, 0, 41),))`."""

    ids: IntArray  # [L]
    logprobs: FloatArray  # [L]
    spans: tuple[Span, ...]  # cover [0, L), no two neighbours say the same
    sampling_mask: SamplingMask | None = None  # L rows; None if one is missing
    routed_experts: RoutedExperts | None = None  # from position 0 on


@dataclass(frozen=True, slots=True)
class StoredRecording:
    """Recordings of a response beside its tokens and log-probabilities."""

    sampling_mask: SamplingMask | None  # L rows, none of a token: the whole vocabulary
    routed_experts: RoutedExperts | None


def join(pieces: Iterable[Piece]) -> Payload:
    """The response that pieces of one trajectory make, in the order of storage; ValueError names a gap, or a
    piece whose log-probabilities are not of its tokens.

    Its spans are those that the pieces were stored with.
    """
    ids: list[bytes] = []
    logprobs: list[bytes] = []
    spans: list[Span] = []
    masks: list[SamplingMask] = []
    experts: list[RoutedExperts] = []
    length = 0
    for piece in pieces:
        if piece.start != length:
            raise ValueError(f"tokens [{length}, {piece.start}) are missing or stored twice")
        if len(piece.ids) != len(piece.logprobs):
            raise ValueError(f"the piece from token {length} on has {len(piece.logprobs)} bytes of logprobs")
        ids.append(piece.ids)
        logprobs.append(piece.logprobs)
        spans.extend(decode_spans(piece.spans))
        length += piece.num_tokens
        if piece.mask is not None:
            masks.append(unpack_mask(piece.mask))
        if piece.experts is not None:
            experts.append(unpack_experts(piece.experts))
    whole = bool(masks) and sum(len(mask.counts) for mask in masks) == length
    return Payload(
        ids=np.frombuffer(b"".join(ids), np.int32),
        logprobs=np.frombuffer(b"".join(logprobs), np.float32),
        spans=merge_spans(spans),
        sampling_mask=join_masks(masks) if whole else None,
        routed_experts=join_experts(experts) if experts else None,
    )


def stored_recordings(connection: sqlite3.Connection, trajectory_ids: Sequence[str]) -> dict[str, StoredRecording]:
    """Recordings of these trajectories by id, as stored in SQLite; trajectories without any are left out."""
    masks: dict[str, list[SamplingMask]] = {}
    experts: dict[str, list[RoutedExperts]] = {}
    for first in range(0, len(trajectory_ids), IDS_AT_A_TIME):
        ids = trajectory_ids[first : first + IDS_AT_A_TIME]
        rows = connection.execute(
            "SELECT id, length(s.ids) / 4, mask, experts FROM segment s JOIN trajectory ON number = s.trajectory"
            f" WHERE id IN ({', '.join('?' * len(ids))}) ORDER BY s.trajectory, s.start, s.rowid",
            ids,
        )
        for id, num_tokens, mask, routed in rows:
            masks.setdefault(id, []).append(_whole(num_tokens) if mask is None else unpack_mask(mask))
            if routed is not None:
                experts.setdefault(id, []).append(unpack_experts(routed))
    return {
        id: StoredRecording(
            joined if len(joined.ids) else None, join_experts(experts[id]) if id in experts else None
        )
        for id, joined in ((id, join_masks(pieces)) for id, pieces in masks.items())
        if len(joined.ids) or id in experts
    }


def _whole(num_tokens: int) -> SamplingMask:
    """Mask of tokens that were drawn from the whole vocabulary."""
    return SamplingMask(np.zeros(num_tokens, np.int32), np.empty(0, np.int32))


def stored_pieces(
    connection: sqlite3.Connection, where: str = "1", values: tuple[object, ...] = ()
) -> Iterator[Piece]:
    """Pieces in SQLite whose trajectory meets the SQL condition, by trajectory and in the order of storage."""
    cursor = connection.execute(
        "SELECT s.trajectory, s.start, s.spans, s.ids, s.logprobs, s.mask, s.experts, s.digest FROM segment s"
        f" JOIN trajectory ON number = s.trajectory WHERE {where} ORDER BY s.trajectory, s.start, s.rowid",
        values,
    )
    return (Piece(*row) for row in cursor)
