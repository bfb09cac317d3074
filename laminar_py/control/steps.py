"""A learner step's microbatches and events, and the watch over steps that `refill` could not fill.

The trainer calls these functions. `RefillWatch` ends a run whose groups have no signal. A single empty step is no
proof: if one group in a hundred has signal and a step of 32 may generate 128, then 28 % of the steps are empty.
"""

import logging
import math
from collections.abc import Callable

import msgspec

from laminar_py.config.algorithm import Advantage
from laminar_py.config.run import RunConfig
from laminar_py.control.consumption import StepBatch
from laminar_py.learner.packing.balance import fit_bins
from laminar_py.learner.packing.packer import Packed, deal_to_ranks, step_weights
from laminar_py.records.events import AnyEvent, RefillStopped, Stepped, StepSkipped
from laminar_py.records.metrics import StepRow
from laminar_py.records.trajectory import TrajectoryRef

log = logging.getLogger(__name__)

# A run ends after so many empty steps in a row, if they have generated so many groups without signal. If one group
# in a hundred has signal, 1,000 in a row lack it once in 23,000.
MIN_EMPTY, MIN_GROUPS = 3, 1000


def pack_step(
    config: RunConfig, batch: StepBatch, *, attention_share: float, shares: bool
) -> Packed[TrajectoryRef]:
    """Return the microbatches of each rank, or of ranks that share them.

    `attention_share` is attention's cost relative to linear layers. `shares`: samples share their prompt in a row.
    """
    algorithm = config.algorithm
    bins = fit_bins(batch.trajectories, max_tokens=config.row_tokens, shares=shares)
    terms = step_weights(
        bins,
        tokens_without_signal=batch.tokens_without_signal,
        aggregation=algorithm.aggregation,
        ages=batch.ages,
        constant=config.rollout.sampling.max_new_tokens,
        normalises=algorithm.advantage is Advantage.BATCH_STD,
        columns=algorithm.packed_columns,
    )
    return deal_to_ranks(
        bins,
        terms,
        max_tokens=config.row_tokens,
        ranks=config.learner.num_rows,
        attention_share=attention_share,
    )


def step_events(row: StepRow, batch: StepBatch, *, incarnation: int, skipped: int) -> list[AnyEvent]:
    """Return the events of a committed step; `skipped` counts its updates without a finite gradient."""
    stepped = Stepped(
        step=row.step,
        incarnation=incarnation,
        num_trajectories=len(batch.trajectories),
        num_tokens=sum(trajectory.length for trajectory in batch.trajectories),
        loss=row.loss if row.trained else None,
        grad_norm=row.grad_norm if row.trained else None,
        reward=None if math.isnan(row.reward) else row.reward,
        elapsed_s=row.learner_s,
        waited_s=row.waited_s,
        reference_s=row.reference_s,
    )
    if not skipped:
        return [stepped]
    ids = tuple(trajectory.id for trajectory in batch.trajectories)
    return [stepped, StepSkipped(row.step, incarnation, skipped, ids)]


class RefillWatch:
    """Counts steps without any group at `rollout.max_refill`; after too many in a row, calls `end(message)`."""

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
        self._empty: list[RefillStopped] = []  # events of the latest steps in a row that got no group

    def observe_batch(self, batch: StepBatch, stopped: RefillStopped | None) -> None:
        """Record `stopped`, and end the run after too many batches without groups in a row.

        `stopped` is the event of a batch with too few groups, None for a full batch.
        """
        if batch.groups:
            self._empty.clear()
        if stopped is None:
            return
        self._record(stopped)
        if not self._empty:  # of empty steps in a row, log only the first
            log.warning("step %d, at %s: %s", stopped.step, self._setting, stopped.describe())
        if batch.groups:
            return
        self._empty.append(stopped)
        total = msgspec.structs.replace(
            stopped,
            num_without_signal=sum(event.num_without_signal for event in self._empty),
            num_best=sum(event.num_best for event in self._empty),
            num_worst=sum(event.num_worst for event in self._empty),
        )
        if len(self._empty) >= MIN_EMPTY and total.num_without_signal >= MIN_GROUPS:
            self._end(
                f"step {total.step}, {len(self._empty)} times in a row at {self._setting}: {total.describe()};"
                f" there is nothing to learn from, {self._remedy}"
            )
