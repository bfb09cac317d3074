"""Salvage of what a dead replica's running trajectories had got and nobody was told, from its journals.

Runs on the host, called by the controller when a replica died (`workers.payload`). The pieces go to a new segment
of that part, which is on disk before anybody hears of it; the journals stay until that is on record. Invariant:
what is given back goes on exactly where the record ends, or is left out.
"""

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import msgspec

from laminar_py.ledger.segments.frames import whole_frames
from laminar_py.ledger.segments.payload import mask_of
from laminar_py.ledger.segments.writer import JOURNAL, SegmentWriter, tokens_ref
from laminar_py.records.codec import decode, encode
from laminar_py.records.pieces import (
    Piece,
    PieceRef,
    TokensRef,
    join_experts,
    join_masks,
    pack_experts,
    pack_mask,
    unpack_experts,
)
from laminar_py.records.spans import Span, replace_spans


class Known(msgspec.Struct, frozen=True, array_like=True):
    """Epoch of a trajectory that a dead replica had, and how many of its tokens are on record."""

    epoch: int
    length: int


class SalvageRequest(msgspec.Struct, frozen=True):
    """Trajectories that parts had when they died, by id; journals of these names tell more of them.

    What is found goes to a segment under `label`.
    """

    pattern: str
    label: str
    running: dict[str, Known]


class Salvaged(msgspec.Struct, frozen=True, kw_only=True):
    """More tokens of one trajectory."""

    trajectory_id: str
    tokens: TokensRef
    spans: tuple[Span, ...]  # may begin before the tokens, as in `Piece`
    used_s: float


class Salvage(msgspec.Struct, frozen=True):
    """Answer of a host, with the journals that it was read from: to be discarded once it is on record."""

    found: list[Salvaged]
    journals: list[str]


def salvage(folder: str, request: bytes) -> bytes:
    """`Salvage` for a `SalvageRequest`, from the journals in a folder of this host. Raises `OSError`."""
    wanted = decode(SalvageRequest, request)
    journals = sorted(Path(folder).glob(f"{wanted.pattern}{JOURNAL}"))
    merged = continuations(chain.from_iterable(map(_entries, journals)), wanted.running)
    writer = SegmentWriter(Path(folder), wanted.label)
    refs = writer.write_all(merged)
    writer.close()
    found = [salvaged(piece, ref) for piece, ref in zip(merged, refs, strict=True)]
    return encode(Salvage(found, [path.name for path in journals]))


def salvaged(piece: Piece, ref: PieceRef) -> Salvaged:
    """Answer for a trajectory of which a piece was found, once that lies where `ref` says."""
    return Salvaged(
        trajectory_id=piece.trajectory_id,
        tokens=tokens_ref(piece, ref),
        spans=piece.spans,
        used_s=piece.used_s,
    )


def merge(pieces: Sequence[Piece]) -> Piece:
    """Pieces of one trajectory that lie end to end as one."""
    if len(pieces) == 1:
        return pieces[0]
    spans: tuple[Span, ...] = ()
    for piece in pieces:
        spans = replace_spans(spans, piece.spans)
    masked = any(piece.mask is not None for piece in pieces)
    experts = [unpack_experts(piece.experts) for piece in pieces if piece.experts is not None]
    return msgspec.structs.replace(
        pieces[-1],
        start=pieces[0].start,
        spans=spans,
        ids=b"".join(piece.ids for piece in pieces),
        logprobs=b"".join(piece.logprobs for piece in pieces),
        mask=pack_mask(join_masks([mask_of(piece) for piece in pieces])) if masked else None,
        experts=pack_experts(join_experts(experts)) if experts else None,
    )


def _entries(path: Path) -> Iterator[Piece]:
    with path.open("rb") as file:
        if path.stat().st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield from (piece for piece in whole_frames(memoryview(data)) if isinstance(piece, Piece))


def continuations(pieces: Iterable[Piece], running: Mapping[str, Known]) -> list[Piece]:
    """Continuation of each trajectory from where its record ends, of entries of a journal that lie end to end."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        known = running.get(piece.trajectory_id)
        if known is not None and piece.epoch == known.epoch:
            run = found.setdefault(piece.trajectory_id, [])
            if piece.start == (run[-1].end if run else known.length):
                run.append(piece)
    return [merge(run) for run in found.values() if run]
