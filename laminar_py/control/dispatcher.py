"""The dispatcher assigns evaluations, then waiting trajectories, then new groups to replicas.

`control.scheduler` owns the `Dispatcher`. Each assignment is recorded as an `Assigned` event with a new epoch, and
is counted in the replica's view. `Throttle` limits how often the controller dispatches.
"""

import asyncio
import math
from collections.abc import Callable, Sequence

import msgspec

from laminar_py.control.evaluation import Evaluations
from laminar_py.control.moves import Round
from laminar_py.control.state import ControlState
from laminar_py.control.waiting import WaitingQueue
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.replica import Assignment, Move
from laminar_py.records.trajectory import Kind, Prompt, Status

MOST_NEW = 128  # new trajectories per `dispatch`, so that the event loop also gets to other work


class Dispatcher:
    """Assigns waiting and new trajectories to replicas, and begins the moves of a repack round."""

    def __init__(
        self,
        state: ControlState,
        *,
        waiting: WaitingQueue,
        evaluations: Evaluations,
        prompt_at: Callable[[int], Prompt],  # by place in the stream, for new groups
        on_issued: Callable[[str, Prompt], None],
    ) -> None:
        self._state = state
        self._router = waiting.router
        self._waiting = waiting
        self._evaluations = evaluations
        self._prompt_at = prompt_at
        self._on_issued = on_issued

    def dispatch(self) -> dict[int, list[Assignment]]:
        """Assign waiting trajectories, then at most a batch of new groups; return the assignments by replica."""
        out: dict[int, list[Assignment]] = {}
        self._waiting.extend(self._evaluations.start())
        for trajectory, replica, pin in self._waiting.pop_placed():
            self._assign(trajectory, replica, pin, out)
        settings = self._state.settings
        # a schedule that waits for whole batches issues a whole batch together
        batch = settings.admission.batch if settings.admission.by_batch else MOST_NEW // settings.group_size
        for _ in range(min(self._router.num_admitted, max(1, batch))):
            view = self._router.for_new(settings.group_size)
            if view is None:
                break
            members = self._state.issue_group(self._prompt_at(self._state.next_prompt))
            self._on_issued(members[0].group_id, members[0].prompt)
            for trajectory in members:
                self._assign(trajectory, view.index, None, out)
        self._expect_more(out)
        return out

    @property
    def has_more(self) -> bool:
        """Whether another `dispatch` could issue a group now; one call issues a limited number."""
        return self._router.num_admitted > 0 and self._router.for_new(self._state.settings.group_size) is not None

    def for_starting(self, replica: int) -> list[Assignment]:
        """Assign to a starting replica trajectories of versions that no replica serves, oldest version first."""
        out: dict[int, list[Assignment]] = {}
        self._waiting.extend(self._evaluations.start())
        for trajectory, pin in self._waiting.pop_for_starting():
            self._assign(trajectory, replica, pin, out)
        self._expect_more(out)
        return sorted(out.get(replica, []), key=lambda assignment: assignment.version or 0)

    def move(self, version: int, planned: Sequence[Move]) -> Round:
        """Begin the moves of a repack plan that are still possible, and return them as a round.

        Each destination has promised to keep `version`. It gets a call-off for a move that has become impossible.
        """
        moving = Round(version=version, open={})
        for move in planned:
            if self._may_move(move, version):
                moving.open[move.trajectory_id] = move.destination
                moving.planned[move.trajectory_id] = move.prefill
                moving.asked.setdefault(move.source, []).append(move.trajectory_id)
            else:
                open_move = self._state.moves.destination(move.trajectory_id)
                if open_move is None or open_move[0] != move.destination:
                    self._state.moves.queue_call_off(move.destination, move.trajectory_id)
        self._state.moves.begin(moving)
        return moving

    def _may_move(self, move: Move, version: int) -> bool:
        """Whether a planned move is still possible.

        Since the surveys of the plan, the trajectory may have ended or left the source, another move of it may
        have begun, or the destination may have loaded another version.
        """
        trajectory = self._state.live.get(move.trajectory_id)
        return (
            trajectory is not None
            and self._state.may_run(trajectory)
            and trajectory.status is Status.RUNNING
            and trajectory.runs_on == move.source
            and trajectory.last_version in (None, version)
            and self._state.moves.destination(move.trajectory_id) is None
            and self._state.views.serves(move.destination, version)
        )

    def _assign(
        self, trajectory: LiveTrajectory, replica: int, pin: int | None, out: dict[int, list[Assignment]]
    ) -> None:
        """Record an assignment under version `pin` (None: any), close the trajectory's move, and extend `out`."""
        self._state.moves.arrives(trajectory.id, replica, length=trajectory.length, prefill=trajectory.prefill)
        self._state.record(trajectory.assigned(replica))
        self._state.views.send(replica, trajectory.id, pin=pin)
        has_environment = self._state.settings.has_environment
        item = trajectory.assignment(self._state.sampling(trajectory), pin, with_problem=has_environment)
        if not trajectory.sample_index and not item.tokens:  # one member brings them for its group
            earlier = self._state.earlier.for_replica(replica, trajectory.prompt.id)
            item = msgspec.structs.replace(item, earlier=earlier) if earlier else item
        out.setdefault(replica, []).append(item)

    def _expect_more(self, out: dict[int, list[Assignment]]) -> None:
        """Let replicas keep the version of a pass that runs beside training while further members of it wait.

        Marks the assignments of such a pass `more_to_come`, and calls off passes of which no member waits.
        """
        self._state.moves.release_passes(self._waiting.has_members)
        for replica, assignments in out.items():
            for place, item in enumerate(assignments):
                more = item.kind is Kind.EVAL and self._waiting.has_members(item.group_id)
                if more and self._evaluations.pass_of(item).replica is not None:
                    self._state.moves.expect_more(item.group_id, replica)
                    assignments[place] = msgspec.structs.replace(item, more_to_come=True)


DISPATCH_S = 0.02  # between dispatches; a replica gathers news for five times as long before it reports


class Throttle:
    """Calls `act` after `wake`, at most once per `every_s` seconds, e.g. `Throttle(issue, every_s=0.02)`."""

    def __init__(self, act: Callable[[], None], *, every_s: float) -> None:
        self._act = act
        self._every_s = every_s
        self._due = asyncio.Event()
        self._last_s = -math.inf  # start of the last call, on the loop's clock

    def wake(self) -> None:
        """Request a call of `act`; the next call answers all requests before it."""
        self._due.set()

    def run_now(self) -> None:
        """Call `act` now, which also answers earlier requests."""
        self._due.clear()
        self._last_s = asyncio.get_running_loop().time()
        self._act()

    async def run(self) -> None:
        """Call `act` for the requests of `wake`, until cancelled."""
        while True:
            await self._due.wait()
            await asyncio.sleep(self._rest_s)  # `run_now` may answer the request during this sleep
            if self._due.is_set() and not self._rest_s:
                self.run_now()

    @property
    def _rest_s(self) -> float:
        """Seconds until the next call may begin."""
        return max(0.0, self._last_s + self._every_s - asyncio.get_running_loop().time())
