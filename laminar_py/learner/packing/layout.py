"""How the sequences of trajectories lie in a packed row, a prefix that several share once. Pure.

Samples of one prompt share it, and the sequences of a response that is a tree share their stems. A row is cut into
segments: a token attends to earlier tokens of its segment and of the segments above, so that a path from the root
is one sequence. Each token is trained on in one place. The last shared token begins every branch, so every row
still predicts one token. A segment ends with the prompt, so a tree has as many tokens behind its prompt beside
siblings as alone. Prompts part where recorded experts differ (`tests/packing/test_layout.py`).
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.records.codec import BoolArray, IntArray
from laminar_py.records.pieces import RoutedExperts
from laminar_py.records.spans import TokenPath, is_tree
from laminar_py.records.trajectory import BaseTrajectory, Packable, Trajectory

PackedT = TypeVar("PackedT", bound=Packable)

LEAST_STEM = 16  # tokens; a shorter prefix costs more to share than to repeat
NO_IDS = np.zeros(0, np.int32)
Keys: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlacedResponse:
    """The `rows` of a microbatch that predict response tokens, ascending, and these tokens' `places` in it.

    E.g. of a trajectory that comes first and has 3 tokens of prompt and 2 of response:
    `PlacedResponse(rows=[2, 3], places=[0, 1])`.
    """

    rows: IntArray
    places: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the S segments of R trajectories lie in the T rows of a microbatch."""

    ids: IntArray  # [T] tokens
    labels: IntArray  # [T] the token after each; 0 at the end of a sequence
    positions: IntArray  # [T] place of each token in its sequence
    lengths: list[int]  # [S]
    parents: IntArray  # [S] the segment that each continues, -1: none
    responses: IntArray  # [S] index in the bundle of a trajectory that has the segment
    placed: list[PlacedResponse]  # [R]
    experts: npt.NDArray[np.int16] | None  # [T, layers, k] routed experts, -1 where none are recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """A sequence from its first to its last token."""

    places: IntArray  # [n] of its tokens in the response; -1: of the prompt
    own: BoolArray  # [n] True on response tokens that this sequence trains on
    keys: Keys  # [n] equal for tokens that two sequences may share
    ids: IntArray  # [n] tokens; [0] where only their number counts
    prompt: int  # how many of them are the prompt's
    response: int  # index of its trajectory


@dataclass(frozen=True, slots=True)
class _Segment:
    """Tokens [first, last) of the paths that share it."""

    paths: list[_Path]
    first: int
    last: int
    parent: int


def lay_out(bundle: Sequence[Trajectory]) -> Layout:
    """Lay the sequences of trajectories out, and return where each response lies.

    An empty bundle has one token without a loss, for a rank that only has to join the collectives.
    """
    if not bundle:
        nothing = np.zeros(1, np.int32)
        empty = {"ids": nothing, "labels": nothing, "positions": nothing, "responses": nothing}
        return Layout(**empty, lengths=[1], parents=nothing - 1, placed=[], experts=None)
    segments = list(_segments(_paths(bundle)))
    heads = [segment.paths[0] for segment in segments]
    cuts = [(path, segment.first, segment.last) for path, segment in zip(heads, segments, strict=True)]
    return Layout(
        ids=np.concatenate([path.ids[first:last] for path, first, last in cuts]),
        labels=np.concatenate([_next_ids(path.ids, first, last) for path, first, last in cuts]),
        positions=np.concatenate([np.arange(first, last, dtype=np.int32) for _, first, last in cuts]),
        lengths=[last - first for _, first, last in cuts],
        parents=np.array([segment.parent for segment in segments], np.int32),
        responses=np.array([path.response for path in heads], np.int32),
        placed=_placed(bundle, segments),
        experts=_experts(bundle, cuts),
    )


def _next_ids(ids: IntArray, first: int, last: int) -> IntArray:
    """[last - first] the token after each of a sequence's tokens [first, last); 0 after the sequence's last."""
    following = ids[first + 1 : last + 1]
    return following if len(following) == last - first else np.append(following, np.int32(0))


class RowSize(NamedTuple):
    """Size of sequences in a row, e.g. of two of 3 and 2 tokens that share nothing: `RowSize(5, 13)`."""

    tokens: int
    squares: float  # sum of squared lengths, what sequences share counted once


def row_size(one: BaseTrajectory) -> RowSize:
    """Return the size of a trajectory, or of its part, in a row."""
    if not is_tree(one.spans):
        length = one.num_tokens
        return RowSize(length, length * length)
    return _size([leaf for _, leaf in _leaves(one)])


def cut_tree(one: PackedT, max_tokens: int) -> list[PackedT]:
    """Cut a tree of more than `max_tokens` into parts of whole sequences; leave other trajectories as they are.

    Neighbours in the tree stay together, and each part repeats the stem of its sequences. A longer sequence is a
    part alone. A part keeps the trajectory's id, and trains on the tokens that its sequences own.
    """
    if one.num_tokens <= max_tokens or not is_tree(one.spans):
        return [one]
    places, leaves = zip(*_leaves(one), strict=True)
    if _size(leaves).tokens <= max_tokens:
        return [one]
    distinct = list(accumulate(leaf.length - leaf.shared for leaf in leaves))  # tokens up to each leaf
    parts, start = [], 0
    while start < len(leaves):
        before = distinct[start] - leaves[start].length
        stop = max(start + 1, bisect_right(distinct, before + max_tokens))
        while stop - start > 1 and _size(leaves[start:stop]).tokens > max_tokens:  # a row repeats a few tokens
            stop -= 1
        parts.append(msgspec.structs.replace(one, sequences=tuple(sorted(places[start:stop]))))
        start = stop
    return parts


# ---- the size of a tree


class _Leaf(NamedTuple):
    """Tokens of a sequence whose neighbours in the tree stand beside it, e.g. `_Leaf(900, 640, 20)`."""

    length: int
    shared: int  # first tokens that the leaf before it has too
    prompt: int


def _leaves(one: BaseTrajectory) -> list[tuple[int, _Leaf]]:
    """Return the sequences of a tree, or of its part, in the order of the tree, each with its place.

    A branch with a longer sequence comes first: the parts of a tree after the first then repeat shorter stems.
    """
    prompt, paths = len(one.prompt_ids), one.token_paths
    longest: dict[int, int] = {}  # tokens of the longest sequence through a run, by the run's start
    for path in sorted(paths, key=lambda path: path.length):
        longest |= dict.fromkeys([start for start, _, _ in path.parts], path.length)
    branches = [[(-longest[start], start, -end) for start, end, _ in path.parts] for path in paths]
    order = sorted(range(len(paths)), key=lambda place: (not paths[place].has_prompt, branches[place]))
    found = []
    for place, before in zip(order, [None, *order], strict=False):
        path = paths[place]
        of_prompt = prompt if path.has_prompt else 0
        shared = 0 if before is None else _num_common(path, paths[before], prompt)
        found.append((place, _Leaf(path.num_tokens(prompt), shared, of_prompt)))
    return found


def _num_common(one: TokenPath, other: TokenPath, prompt: int) -> int:
    """Return how many first tokens two sequences of a tree share."""
    tokens = prompt if one.has_prompt and other.has_prompt else 0
    for (start, end, _), (other_start, other_end, _) in zip(one.parts, other.parts, strict=False):
        if start != other_start:
            break
        tokens += min(end, other_end) - start
        if end != other_end:
            break
    return tokens


def _size(leaves: Sequence[_Leaf]) -> RowSize:
    """Return the size of leaves in a row; it follows `_segments` by numbers of tokens alone."""
    shared = [leaf.shared for leaf in leaves]
    tokens = squares = 0
    waiting = [(0, len(leaves), 0)]  # leaves [start, stop), and their first token
    while waiting:
        start, stop, first = waiting.pop()
        alone = stop - start == 1
        last = leaves[start].length if alone else min(shared[start + 1 : stop])
        if first == 0 and not alone and leaves[start].prompt > LEAST_STEM:
            last = min(last, leaves[start].prompt)
        end = last if alone else last - 1
        if alone or end - first >= LEAST_STEM:
            tokens, squares, first = tokens + end - first, squares + end**2 - first**2, end
        if not alone:
            bounds = [start, *(place for place in range(start + 1, stop) if shared[place] == last), stop]
            waiting += [(some, other, first) for some, other in pairwise(bounds)]
    return RowSize(tokens, squares)


# ---- sequences


def _paths(bundle: Sequence[Trajectory]) -> list[_Path]:
    """Return the sequences of all trajectories, with the keys by which they share tokens."""
    firsts: dict[bytes, tuple[int, RoutedExperts | None]] = {}  # prompt -> the first trajectory with it
    found = []
    for response, trajectory in enumerate(bundle):
        prompt = trajectory.prompt_ids
        own = (response, trajectory.routed_experts)
        number, experts = firsts.setdefault(prompt.tobytes(), own)
        shared = _equal_experts(experts, trajectory.routed_experts, len(prompt))
        keys = np.arange(len(prompt), dtype=np.int64) - ((number + 1) << 32)
        keys[shared:] += (response + 1) << 50  # from here on its own
        for path in trajectory.token_paths:
            cut = _path(path, len(prompt))
            before = len(prompt) if path.has_prompt else 0
            ids = np.concatenate([prompt[:before], trajectory.response_ids[path.places]])
            own_keys = cut.keys[before:] + ((response + 1) << 32)
            found.append(replace(cut, response=response, ids=ids, keys=np.concatenate([keys[:before], own_keys])))
    return found


def _path(path: TokenPath, prompt: int) -> _Path:
    """Return a sequence without its tokens; `prompt` tokens come first where it has the prompt."""
    before, places = prompt if path.has_prompt else 0, path.places
    return _Path(
        places=np.concatenate([np.full(before, -1, np.int32), places]),
        own=np.concatenate([np.zeros(before, np.bool_), path.own]),
        keys=np.concatenate([np.arange(before, dtype=np.int64) - (1 << 32), places.astype(np.int64)]),
        ids=NO_IDS,
        prompt=before,
        response=0,
    )


def _equal_experts(one: RoutedExperts | None, other: RoutedExperts | None, length: int) -> int:
    """Return how many of the first `length` positions have the same recorded experts in both."""
    if one is None and other is None:
        return length
    if one is None or other is None or one.start != other.start or one.table.shape[1:] != other.table.shape[1:]:
        return 0
    known = min(length - one.start, one.positions, other.positions)
    differs = (one.table[:known] != other.table[:known]).any(axis=(1, 2))
    return one.start + (int(differs.argmax()) if differs.any() else known)


# ---- segments


def _segments(paths: Sequence[_Path]) -> Iterator[_Segment]:
    """Cut paths into segments, each parent before its children."""
    number = 0
    waiting = [(members, 0, -1) for members in reversed(_by_key(paths, 0))]  # with their first token and parent
    while waiting:
        members, first, parent = waiting.pop()
        last, prompt = _common(members, first), members[0].prompt
        if first == 0 and len(members) > 1 and prompt > LEAST_STEM:
            last = min(last, prompt)
        going_on = [path for path in members if len(path.keys) > last]
        if len(members) > 1 and going_on and last - 1 - first < LEAST_STEM:  # too short to share
            alone = [[path] for path in members if len(path.keys) == last]
            waiting += [(some, first, parent) for some in reversed([*alone, *_by_key(going_on, last)])]
            continue
        end = last - 1 if going_on else last
        yield _Segment(members, first, end, parent)
        waiting += [(some, end, number) for some in reversed(_by_key(going_on, last))]
        number += 1


def _by_key(paths: Sequence[_Path], place: int) -> list[list[_Path]]:
    """Group paths by their token at `place`."""
    groups: dict[int, list[_Path]] = {}
    for path in paths:
        groups.setdefault(int(path.keys[place]), []).append(path)
    return list(groups.values())


def _common(paths: Sequence[_Path], first: int) -> int:
    """Return the end of the tokens that all paths share, which is behind `first`."""
    keys, end = paths[0].keys, min(len(path.keys) for path in paths)
    for path in paths[1:]:
        differs = keys[first:end] != path.keys[first:end]
        if differs.any():
            end = first + int(differs.argmax())
    return end


# ---- rows


def _placed(bundle: Sequence[Trajectory], segments: Sequence[_Segment]) -> list[PlacedResponse]:
    """Return for each response the rows that predict tokens which its sequences own."""
    row_of = [np.full(len(trajectory.response_ids), -1, np.int32) for trajectory in bundle]
    row = 0
    for segment in segments:
        first, last = segment.first, segment.last
        for path in segment.paths:
            places, own = path.places[first + 1 : last + 1], path.own[first + 1 : last + 1]
            rows = row_of[path.response]
            predicted = np.flatnonzero(own)
            predicted = predicted[rows[places[predicted]] < 0]  # a short prefix is repeated, and trained on once
            rows[places[predicted]] = row + predicted
        row += last - first
    found = []
    for rows in row_of:
        known = np.flatnonzero(rows >= 0)
        ordered: IntArray = known[np.argsort(rows[known])].astype(np.int32)
        found.append(PlacedResponse(rows[ordered], ordered))
    return found


def _experts(bundle: Sequence[Trajectory], cuts: Sequence[tuple[_Path, int, int]]) -> npt.NDArray[np.int16] | None:
    """[T, layers, k] recorded experts of all segments; None if no trajectory has any.

    The last token of a response has no experts, since it is never an input. A response that is a tree has none.
    """
    recorded = [trajectory.routed_experts for trajectory in bundle]
    shapes = {(experts.layers, experts.top_k) for experts in recorded if experts is not None}
    if not shapes:
        return None
    (shape,) = shapes
    out = np.full((sum(last - first for _, first, last in cuts), *shape), -1, np.int16)
    row = 0
    for path, first, last in cuts:
        experts = recorded[path.response]
        if experts is not None:
            begin, end = max(first, experts.start), min(last, experts.start + experts.positions)
            out[row + begin - first : row + end - first] = experts.table[
                begin - experts.start : end - experts.start
            ]
        row += last - first
    return out
