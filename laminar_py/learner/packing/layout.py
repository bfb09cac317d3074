"""Places of a microbatch: which rows hold which tokens of its trajectories, and which predict them. Pure.

Called by `packing.packer`, and by who reads numbers out of a microbatch that are of a response's tokens. A
trajectory is one sequence, or several where its response is a tree (`records.tree`); sequences of a trajectory lie
end to end. Invariant: each response token is predicted by one row at most, that of its own sequence, and by none
where nothing stands before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from laminar_py.records.codec import IntArray
from laminar_py.records.recordings import SamplingMask
from laminar_py.records.trajectory import Trajectory
from laminar_py.records.tree import TokenPath, is_tree, sequences_of

Chosen: TypeAlias = slice | IntArray


@dataclass(frozen=True, slots=True)
class PlacedResponse:
    """Response tokens at `places` and the rows of the microbatch that predict them, in the order of the rows.

    E.g. of a trajectory that comes first and has 3 tokens of prompt and 2 of response:
    `PlacedResponse(slice(2, 4), slice(0, 2))`.
    """

    rows: Chosen
    places: Chosen

    def mask_ids(self, mask: SamplingMask) -> IntArray:
        """Ids of a sampling mask of the response, in the order of the rows."""
        if isinstance(self.places, slice):
            return mask.ids
        ends = np.cumsum(mask.counts)
        return np.concatenate([mask.ids[ends[place] - mask.counts[place] : ends[place]] for place in self.places])


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """S sequences of R trajectories, in T rows."""

    ids: IntArray  # [T]
    lengths: list[int]  # [S]
    responses: IntArray  # [S] place of the trajectory that each sequence is of
    placed: list[PlacedResponse]  # [R]


def lay_out(bundle: Sequence[Trajectory]) -> Layout:
    """Layout of trajectories that share a microbatch."""
    ids: list[IntArray] = []
    lengths: list[int] = []
    responses: list[int] = []
    placed: list[PlacedResponse] = []
    start = 0
    for index, trajectory in enumerate(bundle):
        prompt, response = trajectory.prompt_ids, trajectory.response_ids
        if not is_tree(trajectory.spans):
            first, end = start + len(prompt), start + len(prompt) + len(response)
            ids += [prompt, response]
            lengths.append(end - start)
            placed.append(PlacedResponse(slice(first - 1, end - 1), slice(0, len(response))))
        else:
            paths = sequences_of(trajectory.spans)
            ids += [part for path in paths for part in _tokens(path, trajectory)]
            lengths += [path.num_tokens(len(prompt)) for path in paths]
            placed.append(_placed(paths, prompt=len(prompt), start=start))
            end = start + sum(lengths[len(responses) :])
        responses += [index] * (len(lengths) - len(responses))
        start = end
    return Layout(ids=np.concatenate(ids), lengths=lengths, responses=np.array(responses, np.int32), placed=placed)


def positions(lengths: Sequence[int]) -> IntArray:
    """[T] place of each row in its sequence."""
    return np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])


def next_ids(ids: IntArray, lengths: Sequence[int]) -> IntArray:
    """[T] token after each in the same sequence, 0 behind the last."""
    labels = np.zeros(len(ids), np.int32)
    labels[:-1] = ids[1:]
    labels[np.cumsum(lengths) - 1] = 0
    return labels


def _tokens(path: TokenPath, trajectory: Trajectory) -> list[IntArray]:
    parts = [trajectory.response_ids[start:end] for start, end, _ in path.parts]
    return [trajectory.prompt_ids, *parts] if path.has_prompt else parts


def _placed(paths: Sequence[TokenPath], *, prompt: int, start: int) -> PlacedResponse:
    rows, places = [], []
    for path in paths:
        before = prompt if path.has_prompt else 0
        predicting = start + before - 1 + np.arange(path.length, dtype=np.int32)
        own: npt.NDArray[np.bool_] = path.own & (predicting >= start)
        rows.append(predicting[own])
        places.append(path.places[own])
        start += path.num_tokens(prompt)
    return PlacedResponse(np.concatenate(rows), np.concatenate(places))
