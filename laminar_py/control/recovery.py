"""Recovery of the control plane: a new controller takes up what a dead one left in the ledger.

The controller calls `check_scored` at its own start, and `control.scheduler` `restore` once, before anything is
handed out. Partial responses wait for a replica, everything else goes on where it was.
"""

from collections.abc import Iterable

from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.config.section import ConfigError
from laminar_py.control.book import Book
from laminar_py.control.closing import Closing
from laminar_py.control.evaluation import Evaluations
from laminar_py.control.groups import Group
from laminar_py.control.reports import Reports
from laminar_py.control.waiting import WaitingQueue
from laminar_py.ledger.recovery import Recovered
from laminar_py.ledger.segments.salvage import Salvaged
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.trajectory import Kind, Status


def check_scored(live: Iterable[LiveTrajectory], algorithm: AlgorithmConfig) -> None:
    """Raise `ConfigError` if a training response was scored without a column that the algorithm needs."""
    for entry in live:
        for column in algorithm.scored_columns if entry.kind is Kind.TRAIN and entry.reward is not None else ():
            own = entry.columns.get(column.name)
            if own is None or own.dtype is not column.dtype:
                raise ConfigError(
                    f"algorithm.name={algorithm.name}: needs the column {column.name!r} in {column.dtype}, without"
                    f" which {entry.id} was scored; resume with the algorithm of before, or start a run of its own"
                )


async def restore(
    recovered: Recovered,
    book: Book,
    *,
    waiting: WaitingQueue,
    evaluations: Evaluations,
    closing: Closing,
    reports: Reports,
    salvaged: Iterable[Salvaged],
) -> None:
    """Fill an empty book with what was live, and with what was `salvaged` of what ran.

    Evaluations that were not asked for again are dropped.
    """
    more = {one.trajectory_id: one for one in salvaged}
    book.next_prompt, book.ages = recovered.next_prompt, recovered.ages
    book.refilled, book.rewards = list(recovered.refilled), recovered.rewards
    evaluations.next_index = max(evaluations.next_index, recovered.next_evaluation)
    for trajectory in recovered.live:
        book.recorder.machine.adopt(trajectory)
        if trajectory.kind is Kind.EVAL and not evaluations.take_up(trajectory):
            evaluations.abandon(trajectory)
            continue
        if trajectory.kind is Kind.TRAIN:
            next_sample = recovered.next_sample[trajectory.group_id]
            group = book.groups.setdefault(
                trajectory.group_id,
                Group(id=trajectory.group_id, prompt=trajectory.prompt, next_sample=next_sample),
            )
            group.members[trajectory.id] = trajectory
        if trajectory.status is Status.RUNNING:
            reports.take_over(trajectory, more.get(trajectory.id))
            book.record(trajectory.interrupted("controller_died"))
        if trajectory.status in (Status.QUEUED, Status.INTERRUPTED):
            waiting.append(trajectory)
        else:
            closing.restore_member(trajectory)
    for group in list(book.groups.values()):
        await closing.restore(group)
