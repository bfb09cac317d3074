"""A learner step's microbatches and events, and the watch over steps that `refill` could not fill.

The trainer calls it. A run whose groups have no signal ends. One empty step is no proof: if one group in a hundred
has signal and a step of 32 may generate 128, then 28 % of the steps are empty.
"""

import logging
from collections.abc import Callable

import msgspec

from laminar_py.config.run import RunConfig
from laminar_py.control.consumption import StepBatch
from laminar_py.learner.packing.balance import fit_bins
from laminar_py.learner.packing.packer import Packed, deal_to_ranks, step_weights
from laminar_py.records.events import AnyEvent, RefillStopped, Stepped, StepSkipped
from laminar_py.records.metrics import StepRow
from laminar_py.records.trajectory import TrajectoryRef

log = logging.getLogger(__name__)

MIN_CEILINGS = 3  # empty steps in a row that end a run, with
MIN_GROUPS = 1000  # groups in a row without signal; by chance once in 23,000 if one in a hundred has signal


def pack_step(config: RunConfig, batch: StepBatch, *, attention_share: float) -> Packed[TrajectoryRef]:
    """Return the microbatches of each rank."""
    algorithm = config.algorithm
    bins = fit_bins(batch.trajectories, max_tokens=config.packer.max_tokens)
    terms = step_weights(
        bins,
        tokens_without_signal=batch.tokens_without_signal,
        aggregation=algorithm.aggregation,
        ages=batch.ages,
        constant=config.rollout.sampling.max_new_tokens,
        normalises=algorithm.normalises_step,
        columns=algorithm.packed_columns,
    )
    return deal_to_ranks(
        bins,
        terms,
        max_tokens=config.packer.max_tokens,
        ranks=config.learner.world_size,
        attention_share=attention_share,
    )


def step_events(row: StepRow, batch: StepBatch, *, incarnation: int, skipped: int) -> list[AnyEvent]:
    """Return the events of a step in which `skipped` updates had no finite gradient."""
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


class RefillWatch:
    """Counts steps that stay empty at `rollout.max_refill`; calls `end` with a message after too many in a row."""

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
        self._num_empty: list[RefillStopped] = []  # empty steps in a row

    def observe_batch(self, batch: StepBatch, stopped: RefillStopped | None) -> None:
        """Count a batch; `stopped` is the event of a batch with too few groups, and is recorded."""
        if batch.groups:
            self._num_empty.clear()
        if stopped is None:
            return
        self._record(stopped)
        if not self._num_empty:  # once per row of empty steps
            log.warning("step %d, at %s: %s", stopped.step, self._setting, stopped.describe())
        if batch.groups:
            return
        self._num_empty.append(stopped)
        row = msgspec.structs.replace(
            stopped,
            num_without_signal=sum(ceiling.num_without_signal for ceiling in self._num_empty),
            num_best=sum(ceiling.num_best for ceiling in self._num_empty),
            num_worst=sum(ceiling.num_worst for ceiling in self._num_empty),
        )
        if len(self._num_empty) >= MIN_CEILINGS and row.num_without_signal >= MIN_GROUPS:
            self._end(
                f"step {row.step}, {len(self._num_empty)} times in a row at {self._setting}: {row.describe()};"
                f" there is nothing to learn from, {self._remedy}"
            )
