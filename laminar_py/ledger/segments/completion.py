"""Trajectories with their tokens, read by their references. Called by learner ranks and the reference model."""

from collections.abc import Mapping, Sequence

from laminar_py.ledger.segments.reader import Loaded, PayloadReader
from laminar_py.records.finished import FinishedTrajectory
from laminar_py.records.pieces import PayloadLostError
from laminar_py.records.spans import sampled_mask
from laminar_py.records.trajectory import Trajectory


def complete_all(
    finished: Sequence[FinishedTrajectory], reader: PayloadReader, *, stores: Mapping[str, str]
) -> tuple[dict[str, Trajectory], dict[str, str]]:
    """Trajectories with tokens by id, read together; and of those that are lost, what is."""
    loaded = reader.load((ref for one in finished for ref in one.refs), stores=stores)
    complete: dict[str, Trajectory] = {}
    lost: dict[str, str] = {}
    for one in finished:
        try:
            complete[one.id] = complete_one(one, loaded)
        except PayloadLostError as error:
            lost[one.id] = str(error)
    return complete, lost


def complete_one(finished: FinishedTrajectory, loaded: Loaded) -> Trajectory:
    """A trajectory with its tokens. Raises `PayloadLostError`."""
    response = loaded.response(finished.tokens)
    length = len(response.ids)
    if length != finished.length:
        raise PayloadLostError(f"{length} of its {finished.length} tokens")
    return Trajectory(
        id=finished.id,
        prompt_id=finished.prompt_id,
        group_id=finished.group_id,
        sample_index=finished.sample_index,
        kind=finished.kind,
        prompt_ids=finished.prompt_ids,
        response_ids=response.ids,
        logprobs=response.logprobs,
        loss_mask=sampled_mask(finished.spans if finished.num_trained else (), length),
        spans=finished.spans,
        finish_reason=finished.finish_reason,
        reward=finished.reward,
        advantage=finished.advantage,
        advantage_scale=finished.advantage_scale,
        weight=finished.weight,
        roles=finished.roles,
        sampling_mask=response.sampling_mask,
        routed_experts=response.routed_experts,
        columns={name: loaded.column(column).values for name, column in finished.columns.items()},
    )
