"""Salvage of tokens that a crashed replica had not reported, from its journals.

The controller calls it after the crash (`workers.segments`). It writes the tokens to a new segment and syncs them.
The controller deletes the journals when the tokens are on record. Salvaged tokens continue exactly where the
record ends; other tokens are left out (`tests/segments/test_salvage.py`).
"""

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import msgspec

from laminar_py.ledger.segments.frames import whole_frames
from laminar_py.ledger.segments.payload import join
from laminar_py.ledger.segments.writer import JOURNAL, SegmentWriter, tokens_ref
from laminar_py.records.pieces import Piece, PieceRef, TokensRef, pack_experts, pack_mask
from laminar_py.records.spans import Span


class RecordedProgress(msgspec.Struct, frozen=True, array_like=True):
    """Epoch of a trajectory that ran on a crashed replica, and its number of recorded tokens."""

    epoch: int
    length: int


class Salvaged(msgspec.Struct, frozen=True, kw_only=True):
    """Salvaged tokens of one trajectory."""

    trajectory_id: str
    tokens: TokensRef
    spans: tuple[Span, ...]  # may begin before the tokens, as in `Piece`
    used_s: float


class Salvage(msgspec.Struct, frozen=True):
    """Salvaged tokens, and the journals, which the controller deletes when the tokens are on record."""

    found: list[Salvaged]
    journals: list[Path]


def salvage(folder: Path, label: str, running: Mapping[str, RecordedProgress]) -> Salvage:
    """Salvage tokens of trajectories that ran on a crashed replica, from its journals `<label>.*`.

    `running` has the recorded state of each trajectory, by id. The tokens go to a new segment. Raises `OSError`.
    """
    journals = sorted(folder.glob(f"{label}.*{JOURNAL}"))
    merged = continuations(chain.from_iterable(map(_entries, journals)), running)
    writer = SegmentWriter(folder, f"salvage-{label}")
    refs = writer.write_all(merged)
    writer.close()
    return Salvage([salvaged(piece, ref) for piece, ref in zip(merged, refs, strict=True)], journals)


def salvaged(piece: Piece, ref: PieceRef) -> Salvaged:
    """Return the record of a salvaged piece that was written at `ref`."""
    return Salvaged(
        trajectory_id=piece.trajectory_id,
        tokens=tokens_ref(piece, ref),
        spans=piece.spans,
        used_s=piece.used_s,
    )


def merge(pieces: Sequence[Piece]) -> Piece:
    """Merge consecutive pieces of one trajectory into one piece. Raises `ValueError` for a gap."""
    if len(pieces) == 1:
        return pieces[0]
    whole = join(pieces, start=pieces[0].start)
    return msgspec.structs.replace(
        pieces[-1],
        start=pieces[0].start,
        spans=whole.spans,
        ids=whole.ids.tobytes(),
        logprobs=whole.logprobs.tobytes(),
        mask=None if whole.sampling_mask is None else pack_mask(whole.sampling_mask),
        experts=None if whole.routed_experts is None else pack_experts(whole.routed_experts),
    )


def _entries(path: Path) -> Iterator[Piece]:
    """Yield the complete entries of a journal, in order; none if the file is missing."""
    with suppress(FileNotFoundError), path.open("rb") as file:  # a replica that still runs may delete it
        if os.fstat(file.fileno()).st_size:  # of the open file, since a network folder caches sizes
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield from (piece for piece in whole_frames(memoryview(data)) if isinstance(piece, Piece))


def continuations(pieces: Iterable[Piece], running: Mapping[str, RecordedProgress]) -> list[Piece]:
    """Merge the entries that continue the record of each running trajectory without a gap; omit all others."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        known = running.get(piece.trajectory_id)
        if known is not None and piece.epoch == known.epoch:
            run = found.setdefault(piece.trajectory_id, [])
            if piece.start == (run[-1].end if run else known.length):
                run.append(piece)
    return [merge(run) for run in found.values() if run]
