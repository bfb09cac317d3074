"""A step of the learner: its microbatches, its events, and steps that dynamic sampling could not fill.

Called by the trainer. A run that finds nothing to learn from ends. A single step without any group says little:
where one group in a hundred has signal, and a step of 32 may generate 128, more than one in four is like that.
"""

import logging
from collections.abc import Callable, Mapping

import msgspec

from laminar_py.config.run import RunConfig
from laminar_py.control.consumption import StepBatch
from laminar_py.learner.packing.packer import Packed, assign, step_terms
from laminar_py.records.events import AnyEvent, RefillStopped, Stepped, StepSkipped
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


log = logging.getLogger(__name__)

MIN_CEILINGS = 3  # in a row, each without a group, and
MIN_GROUPS = 1000  # in a row without signal; where one in a hundred has some, one row of 23,000 is as long


class RefillWatch:
    """Ceilings of refill; after too many in a row that gave no group, `end` is called with a line."""

    def __init__(
        self,
        *,
        max_refill: float,
        record: Callable[[AnyEvent], None],
        end: Callable[[str], None],
        remedy: str = "choose other prompts or another reward, and --resume",
    ) -> None:
        self._setting = f"rollout.max_refill={max_refill:g}"
        self._record = record
        self._end, self._remedy = end, remedy
        self._hollow: list[RefillStopped] = []  # ceilings in a row without a group

    def see(self, batch: StepBatch, stopped: RefillStopped | None) -> None:
        """Take in a batch, and the event of too few groups in it, if there are too few."""
        if batch.groups:
            self._hollow.clear()
        if stopped is None:
            return
        self._record(stopped)
        if not self._hollow:  # of many in a row, the first
            log.warning("step %d, at %s: %s", stopped.step, self._setting, stopped.tell())
        if batch.groups:
            return
        self._hollow.append(stopped)
        row = msgspec.structs.replace(
            stopped,
            num_silent=sum(ceiling.num_silent for ceiling in self._hollow),
            num_best=sum(ceiling.num_best for ceiling in self._hollow),
            num_worst=sum(ceiling.num_worst for ceiling in self._hollow),
        )
        if len(self._hollow) >= MIN_CEILINGS and row.num_silent >= MIN_GROUPS:
            self._end(
                f"step {row.step}, {len(self._hollow)} times in a row at {self._setting}: {row.tell()}; there is"
                f" nothing to learn from, {self._remedy}"
            )
