"""Trajectories as they are stored: pieces in a segment, and references to them."""

import tempfile
from pathlib import Path

import msgspec

from laminar_py.learner.packing.packer import microbatches
from laminar_py.ledger.segments.reader import PayloadReader, complete_all
from laminar_py.ledger.segments.writer import SegmentWriter, tokens_ref
from laminar_py.records.codec import decode, encode
from laminar_py.records.pieces import (
    ColumnPiece,
    ColumnRef,
    Piece,
    RoutedExperts,
    SamplingMask,
    pack_experts,
    pack_mask,
)
from laminar_py.records.spans import clip_spans
from laminar_py.records.trajectory import TrajectoryRef
from laminar_py.runtime.workers.specs import FetchRequest, StepRequest


def pieces_of(item, cuts=()):
    """The response of a trajectory, cut at these tokens; experts go with the piece that ends their stream."""
    ends = [*cuts, len(item.response_ids)]
    return [_piece(item, start, end) for start, end in zip([0, *cuts], ends, strict=True)]


def store(item, writer, *, cuts=()):
    """Write a trajectory with its columns; what decisions have of it from then on."""
    written = [(piece, writer.write(piece)) for piece in pieces_of(item, cuts)]
    columns = {
        name: ColumnRef(values.dtype, writer.write(ColumnPiece(trajectory_id=item.id, name=name, values=values)))
        for name, values in item.columns.items()
    }
    return by_reference(item, tuple(tokens_ref(piece, ref) for piece, ref in written), columns)


def store_all(items, folder, *, cuts=(), part="replica-0-1-0"):
    """Write trajectories to one segment in a folder."""
    writer = SegmentWriter(folder, part)
    finished = [store(item, writer, cuts=cuts) for item in items]
    writer.close()
    return finished


def by_reference(item, tokens, columns=None):
    """A trajectory without its tokens."""
    alike = set(TrajectoryRef.__struct_fields__) & set(item.__struct_fields__) - {"columns"}
    return TrajectoryRef(
        **{name: getattr(item, name) for name in alike},
        tokens=tokens,
        num_trained=item.num_trained,
        earned=item.earned,
        columns=columns or {},
    )


def at_ranks(packed):
    """Microbatches of each rank of a step, as it has them: told by reference, of tokens that it reads itself."""
    items = [item for mine in packed.bundles for bundle in mine for item in bundle]
    with tempfile.TemporaryDirectory() as folder:
        cuts = [1] if all(len(item.response_ids) > 1 for item in items) else []
        finished = {one.id: one for one in store_all(items, Path(folder), cuts=cuts)}
        return [_at_rank(mine, packed.weights, finished, Path(folder)) for mine in packed.bundles]


def _at_rank(bundles, terms, finished, folder):
    asked = FetchRequest([[finished[item.id] for item in bundle] for bundle in bundles])
    fetch, step = decode(FetchRequest, encode(asked)), decode(StepRequest, encode(StepRequest(terms)))
    reader = PayloadReader(folder)
    complete, lost = complete_all([one for bundle in fetch.bundles for one in bundle], reader)
    reader.close()
    assert not lost, lost
    return microbatches([[complete[one.id] for one in bundle] for bundle in fetch.bundles], step.terms)


def assert_alike(found, expected):
    """Two trajectories with the same content, bit by bit."""
    for name in expected.__struct_fields__:
        assert msgspec.to_builtins(getattr(found, name), enc_hook=_listed) == msgspec.to_builtins(
            getattr(expected, name), enc_hook=_listed
        ), name


def _listed(array):
    return [str(array.dtype), array.tolist()]


def _piece(item, start, end):
    mask = None if item.sampling_mask is None else pack_mask(_rows(item.sampling_mask, start, end))
    experts = None if item.routed_experts is None else pack_experts(_routed(item, start, end))
    return Piece(
        trajectory_id=item.id,
        epoch=1,
        start=start,
        spans=clip_spans(item.spans, start, end),
        ids=item.response_ids[start:end].tobytes(),
        logprobs=item.logprobs[start:end].tobytes(),
        mask=mask,
        experts=experts,
    )


def _rows(mask, start, end):
    before, after = mask.counts[:start].sum(), mask.counts[:end].sum()
    return SamplingMask(mask.counts[start:end], mask.ids[before:after])


def _routed(item, start, end):
    """Experts of the positions that went through the model to make these tokens, and were not before."""
    experts, prompt = item.routed_experts, len(item.prompt_ids)
    first, last = (0 if start == 0 else prompt + start - 1), prompt + end - 1
    size = experts.layers * experts.top_k * experts.width
    return RoutedExperts(
        start=first,
        layers=experts.layers,
        top_k=experts.top_k,
        width=experts.width,
        data=experts.data[first * size : last * size],
    )
