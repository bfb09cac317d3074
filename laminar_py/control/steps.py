"""A step of the learner: what it is given, and what is put on record of it. Called by the trainer; pure."""

from collections.abc import Mapping

from laminar_py.config.run import RunConfig
from laminar_py.control.consumption import StepBatch
from laminar_py.learner.packing.packer import Packed, assign, step_terms
from laminar_py.records.events import AnyEvent, Stepped, StepSkipped
from laminar_py.records.finished import FinishedTrajectory
from laminar_py.records.metrics import StepRow


def pack_step(
    config: RunConfig, batch: StepBatch, *, stand_ins: Mapping[str, FinishedTrajectory], attention_share: float
) -> Packed[FinishedTrajectory]:
    """Microbatches of each rank; a trajectory that has a stand-in is trained on as that says."""
    algorithm = config.algorithm
    terms = step_terms(
        batch.bins,
        silent_tokens=batch.silent_tokens,
        aggregation=algorithm.aggregation,
        ages=batch.ages,
        constant=config.rollout.sampling.max_new_tokens,
        normalises=algorithm.normalises_step,
        columns=algorithm.packed_columns,
    )
    return assign(
        batch.bins,
        terms,
        stand_ins=stand_ins,
        max_tokens=config.packer.max_tokens,
        ranks=config.learner.world_size,
        attention_share=attention_share,
    )


def step_events(row: StepRow, batch: StepBatch, *, incarnation: int, skipped: int) -> list[AnyEvent]:
    """Events of a step, of whose updates so many were `skipped`."""
    stepped = Stepped(
        step=row.step,
        incarnation=incarnation,
        num_trajectories=len(batch.trajectories),
        num_tokens=sum(trajectory.length for trajectory in batch.trajectories),
        loss=row.loss,
        grad_norm=row.grad_norm,
        reward=row.reward,
        elapsed_s=row.learner_s,
        waited_s=row.waited_s,
        reference_s=row.reference_s,
    )
    if not skipped:
        return [stepped]
    ids = tuple(trajectory.id for trajectory in batch.trajectories)
    return [stepped, StepSkipped(row.step, incarnation, skipped, ids)]
