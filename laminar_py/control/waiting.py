"""The waiting queue: interrupted trajectories, replacements and evaluations that need a replica.

`control.scheduler` owns the queue; the dispatcher empties it. Trajectories wait in lanes, one per need (a version,
a pass, a move). If the first of a lane finds no place, neither does any behind it, so a dispatch costs one look
per lane. A trajectory leaves the queue once: to a replica, or as unreachable if no replica will serve its version
again (`tests/control/test_waiting.py`).

The `Router` chooses the replica. It gives a replica no more new samples than the replica admits. A trajectory
pinned to a version goes only to a replica that serves the version, or to an idle replica that can load it, since
an engine's versions never go back (law 2). New samples of a group go to one replica, which prefills their prompt
once.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TypeAlias

from laminar_py.control.evaluation import Evaluation, Evaluations
from laminar_py.control.settings import Admission
from laminar_py.control.state import ControlState, Phase
from laminar_py.control.views import ReplicaView
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.trajectory import Kind


class Router:
    """Chooses a replica for new, displaced, pinned and evaluation trajectories; changes nothing."""

    def __init__(self, state: ControlState) -> None:
        self._state = state
        self._views = state.views

    @property
    def _admission(self) -> Admission:
        return self._state.settings.admission  # read each time, since its capacity follows the number of replicas

    @property
    def num_admitted(self) -> int:
        """Number of groups that may be issued now; the groups that the current step lacks count as live.

        Without that, later groups would be issued earlier, and would be older when a step consumes them.
        """
        state = self._state
        if state.phase is not Phase.ADMITTING or (self._admission.by_batch and state.refill_exhausted):
            return 0
        return self._admission.allowed(live=len(state.groups) + state.num_missing, generating=state.num_generating)

    @property
    def _oldest(self) -> int | None:
        """The oldest version that a trajectory without tokens may begin under, None for any."""
        return self._admission.oldest(self._state.newest_version, self._state.ages)

    def for_new(self, size: int) -> ReplicaView | None:
        """Return the least loaded replica that admits `size` new trajectories under a version new enough, or None.

        If steps wait for whole batches, each replica gets at most its share, so that the first replica with new
        weights does not take the whole batch.
        """
        groups = self._admission.share(self._views.num_placed)
        view = self._views.with_room(size, oldest=self._oldest)
        if view is None or groups is None:
            return view
        return view if len(view.in_flight) + size <= groups * self._state.settings.group_size else None

    def for_displaced(self) -> ReplicaView | None:
        """Return a replica for a crashed replica's trajectory: one with room, else the least loaded, or None."""
        return self.for_new(1) or self._views.least_loaded(oldest=max(0, self._oldest or 0))

    def for_pinned(self, version: int, *, limit: int | None = None) -> ReplicaView | None:
        """Return a replica that can continue work of `version`, None if none can now.

        It is the least loaded replica that serves the version, if fewer than `limit` trajectories are in flight
        there. Otherwise it is an idle replica that can load the version, or if there is none, a leaving replica.
        """
        first = next(self._views.that_serve(version), None)
        if first is not None and (limit is None or len(first.in_flight) < limit):
            return first
        return self._idle_below(version) or next(self._views.leaving_that_serve(version), None)

    def for_pass(self, version: int, *, holders: Collection[int], most: int, num_out: int) -> ReplicaView | None:
        """Return a replica for a member of a pass of `version`; None if the member has to wait.

        `holders` are the replicas that got members, and `num_out` members are there now. While fewer than `most`
        holders serve the version, it is a replica without members, if there is any; later it is such a replica
        only if that is idle. Otherwise it is the least loaded holder, unless each has a batch. A leaving replica
        gets the member only if no other can take it.
        """
        views = (self._views.by_index[index] for index in holders)
        serving = [view for view in views if view.version >= 0 and view.serving == version]
        holding = [view for view in serving if not view.leaving] or serving
        if sum(not view.leaving for view in holding) < most:
            others = (view for view in self._views.that_serve(version) if view.index not in holders)
            other = next(others, None) or self._idle_below(version)
            other = other or (None if holding else next(self._views.leaving_that_serve(version), None))
            if other is not None:
                return other
        elif (idle := self._idle_at(version, holders)) is not None:
            return idle
        is_full = num_out >= len(holding) * self._state.settings.batch_per_replica
        least = min(holding, key=lambda view: (len(view.in_flight), view.index), default=None)
        return None if is_full else least

    def _idle_at(self, version: int, holders: Collection[int]) -> ReplicaView | None:
        """Return an idle replica that serves `version` and is none of `holders`, or None."""
        first = next(self._views.that_serve(version), None)  # the least loaded
        return first if first is not None and first.idle and first.index not in holders else None

    def _idle_below(self, version: int) -> ReplicaView | None:
        """Return an idle replica of an older version that has not promised to keep its version, or None."""
        return self._views.idle_below(version, expecting=self._state.moves.expected)


Need: TypeAlias = str | int | None  # a version; the id of a pass or of a moving trajectory; None: any replica


@dataclass(slots=True, eq=False)
class Lane:
    """Waiting trajectories with one need, first come first served, e.g. all that continue under version 7.

    `share` is the most that each starting replica gets, so that several starting replicas divide the lane.
    """

    entries: list[tuple[int, LiveTrajectory]] = field(default_factory=list)  # a heap of (arrival, trajectory)
    share: int | None = None  # most trajectories in flight per replica; None: undivided


class WaitingQueue:
    """Trajectories that wait for a replica, first come first served; a crashed replica's trajectories go first."""

    def __init__(self, state: ControlState, *, evaluations: Evaluations) -> None:
        self.router = Router(state)
        self._state = state
        self._evaluations = evaluations
        self._lanes: dict[Need, Lane] = {}  # without empty lanes
        self._arrivals = count()
        self._displaced: list[LiveTrajectory] = []  # of crashed replicas
        self._unreachable: list[LiveTrajectory] = []  # out of the lanes, until `take_unreachable`

    def append(self, trajectory: LiveTrajectory) -> None:
        """Queue a trajectory behind all others with the same need."""
        self._insert(next(self._arrivals), trajectory)

    def append_displaced(self, trajectory: LiveTrajectory) -> None:
        """Queue a trajectory whose replica crashed, before all others; a full replica may take it too."""
        self._displaced.append(trajectory)

    def extend(self, trajectories: Iterable[LiveTrajectory]) -> None:
        """Queue several trajectories."""
        for trajectory in trajectories:
            self.append(trajectory)

    def remove(self, trajectory_ids: Container[str]) -> None:
        """Remove the trajectories with these ids from the queue; ids that do not wait change nothing."""
        self._displaced = [item for item in self._displaced if item.id not in trajectory_ids]
        self._unreachable = [item for item in self._unreachable if item.id not in trajectory_ids]
        for need, lane in list(self._lanes.items()):
            entries = [entry for entry in lane.entries if entry[1].id not in trajectory_ids]
            if not entries:
                del self._lanes[need]
            elif len(entries) < len(lane.entries):
                lane.entries = entries
                heapify(entries)

    def has_members(self, pass_id: str) -> bool:
        """Whether members of a pass wait."""
        return pass_id in self._lanes

    def take_unreachable(self) -> list[LiveTrajectory]:
        """Return the trajectories that `pop_placed` found unreachable, and forget them."""
        unreachable, self._unreachable = self._unreachable, []
        return unreachable

    def pin(self, trajectory: LiveTrajectory) -> int | None:
        """Return the only version under which a trajectory may continue, None for any."""
        if trajectory.kind is Kind.EVAL:
            return self._evaluations.pass_of(trajectory).version
        return trajectory.last_version if self._state.settings.one_version else None

    def pop_placed(self) -> Iterator[tuple[LiveTrajectory, int, int | None]]:
        """Remove and yield (trajectory, replica, pinned version or None) for each trajectory with a place now.

        The caller assigns each before it takes the next, since an assignment changes the replica's load.
        Trajectories whose version no replica will serve again move from their lane to `take_unreachable`.
        """
        displaced, self._displaced = self._displaced, []
        for trajectory in displaced:
            view = self.router.for_displaced() if self._is_free(trajectory) else None
            if view is None:
                self.append(trajectory)
            else:
                yield trajectory, view.index, None
        heads = [(lane.entries[0][0], need) for need, lane in self._lanes.items()]
        heapify(heads)
        while heads:
            arrival, need = heappop(heads)
            lane = self._lanes[need]
            trajectory = lane.entries[0][1]
            view, pin = self._place(trajectory, lane) if self._state.may_run(trajectory) else (None, None)
            if view is not None:
                self._pop(need)
                if need in self._lanes:
                    heappush(heads, (lane.entries[0][0], need))
                yield trajectory, view.index, pin
            elif pin is not None and self._state.views.is_unreachable(pin):
                self._unreachable += [trajectory for _, trajectory in sorted(self._lanes.pop(need).entries)]
            elif self._need(trajectory) != need:  # its move was called off, so it waits in another lane
                self._pop(need)
                self._insert(arrival, trajectory)

    def pop_for_starting(self) -> Iterator[tuple[LiveTrajectory, int]]:
        """Remove the next starting replica's work from the queue; yield each trajectory with its pinned version.

        A starting replica gets only trajectories that no running replica can take under their version. It loads
        the versions in ascending order, since an engine's version never goes back (law 2).

        Several starting replicas divide the unserved versions: of 3, 4, 5 the first of two gets 3 and 5, and the
        second gets 4. If more replicas start than there are versions, they divide the trajectories of a version.

        A replica gets at most a batch, and in addition all pass members of a version that is loaded only once.
        """
        self.extend(self._displaced)
        self._displaced = []
        pinned: dict[int, list[Need]] = {}
        for need, lane in self._lanes.items():
            pin = self.pin(lane.entries[0][1])
            if pin is not None and self._state.may_run(lane.entries[0][1]):
                pinned.setdefault(pin, []).append(need)
        num_starting = max(1, self._state.views.num_starting())
        unserved = {version: pinned[version] for version in sorted(pinned) if self._is_unserved(version, pinned)}
        popped: list[tuple[int, LiveTrajectory]] = []
        room = self._state.settings.batch_per_replica
        for version in list(unserved)[::num_starting]:
            replicas = self._replicas_for(version, unserved, num_starting)
            for need in unserved[version]:
                count = self._divide(self._lanes[need], replicas)
                if not self._is_loaded_once(self._lanes[need], version):
                    count = min(room, count)
                    room -= count
                popped += [self._pop(need) for _ in range(count)]
        for _, trajectory in sorted(popped):
            pin = self.pin(trajectory)
            assert pin is not None, f"{trajectory.id} goes to a starting replica without a pinned version"
            yield trajectory, pin

    # ---- dividing a version among replicas that start

    def _replicas_for(self, version: int, unserved: Mapping[int, list[Need]], num_starting: int) -> int:
        """Return how many starting replicas take a version: its share of the `unserved` work, at least 1."""
        waiting = {
            other: sum(len(self._lanes[need].entries) for need in needs if need in self._lanes)
            for other, needs in unserved.items()
        }
        replicas = round(num_starting * waiting[version] / sum(waiting.values()))
        return max(1, min(replicas, num_starting - len(unserved) + 1))

    def _divide(self, lane: Lane, replicas: int) -> int:
        """Divide a lane among a number of `replicas`, and return how many trajectories the next replica gets.

        A share is at least a group, whose prompt a replica prefills once. `lane.share` also bounds later replicas.
        """
        settings, version = self._state.settings, self.pin(lane.entries[0][1])
        lane.share = max(settings.group_size, -(-len(lane.entries) // replicas))
        if not self._is_loaded_once(lane, version):
            lane.share = min(settings.batch_per_replica, lane.share)
        return min(lane.share, len(lane.entries))

    def _is_loaded_once(self, lane: Lane, version: int | None) -> bool:
        """Whether a lane has members of a pass whose `version` is older than the newest, or none is published yet.

        A resumed run has such passes. A replica loads such a version only once, since versions never go back. So a
        starting replica gets the whole lane, and its engine queues more than a batch.
        """
        evaluated, newest = lane.entries[0][1].kind is Kind.EVAL, self._state.newest_version
        return evaluated and version is not None and (version < newest or newest < 0)

    def _limit(self, lane: Lane) -> int | None:
        """Return how many trajectories in flight keep a replica from getting more of a lane; None: no limit."""
        if lane.share is None:
            return self._share_of_pass(lane.entries[0][1])
        return lane.share if self._state.views.num_starting() else self._state.settings.batch_per_replica

    def _share_of_pass(self, member: LiveTrajectory) -> int | None:
        """Return a replica's share of a pass, while other replicas are about to serve its version; else None.

        Before RL no replica leaves the newest version, so the other members can wait.
        """
        state, version = self._state, self.pin(member)
        if member.kind is not Kind.EVAL or version is None or version != state.newest_version:
            return None
        replicas = state.views.num_placed
        if not state.before_rl or state.views.num_serving(version) >= replicas:
            return None
        return -(-self._evaluations.pass_of(member).num_members // replicas)

    def _is_unserved(self, version: int, pinned: Mapping[int, list[Need]]) -> bool:
        """Whether some lane that is pinned to a version finds no replica that serves or can load the version."""
        lanes = (self._lanes[need] for need in pinned[version])
        return any(self.router.for_pinned(version, limit=self._limit(lane)) is None for lane in lanes)

    # ---- lanes

    def _need(self, trajectory: LiveTrajectory) -> Need:
        """Return the lane of a trajectory: its own during a move, else its pass's, else its pinned version's."""
        if self._state.moves.destination(trajectory.id) is not None:
            return trajectory.id
        return trajectory.group_id if trajectory.kind is Kind.EVAL else self.pin(trajectory)

    def _insert(self, arrival: int, trajectory: LiveTrajectory) -> None:
        lane = self._lanes.setdefault(self._need(trajectory), Lane())
        heappush(lane.entries, (arrival, trajectory))

    def _pop(self, need: Need) -> tuple[int, LiveTrajectory]:
        """Remove and return (arrival, trajectory) of the first in a lane; an empty lane is deleted."""
        entries = self._lanes[need].entries
        if len(entries) == 1:
            del self._lanes[need]
        return heappop(entries)

    def _is_free(self, trajectory: LiveTrajectory) -> bool:
        """Whether a trajectory may run now as training, under any version and without a move."""
        bound = self.pin(trajectory) is not None or self._state.moves.destination(trajectory.id) is not None
        return trajectory.kind is Kind.TRAIN and not bound and self._state.may_run(trajectory)

    def _place(self, trajectory: LiveTrajectory, lane: Lane) -> tuple[ReplicaView | None, int | None]:
        """Return a replica with a place for a lane's first trajectory, or None, and the pinned version, or None.

        An open move ends here if its destination has left the move's version.
        """
        move, pin = self._state.moves.destination(trajectory.id), self.pin(trajectory)
        if move is not None:
            if self._state.views.serves(*move):
                return self._state.views.by_index[move[0]], move[1]
            self._state.moves.ends(trajectory.id)
        if trajectory.kind is Kind.EVAL and self._evaluations.pass_of(trajectory).replica is not None:
            return self._place_beside_training(self._evaluations.pass_of(trajectory), lane), pin
        if pin is not None:
            return self.router.for_pinned(pin, limit=self._limit(lane)), pin
        return self.router.for_new(1), None

    def _place_beside_training(self, evaluation: Evaluation, lane: Lane) -> ReplicaView | None:
        """Return a replica for a member of a pass that runs beside training, or None, and note it as a holder.

        The pass keeps its replicas from loading newer weights. So it uses as few as hold it with a batch each, and
        only one until its first token fixes the version.
        """
        batch = self._state.settings.batch_per_replica
        num_out = len(evaluation.pending) - len(lane.entries)
        if evaluation.version is None:
            assert evaluation.replica is not None, f"{evaluation.id} has no replica"
            replica = self._state.views.by_index[evaluation.replica]
            view = replica if num_out < batch and replica.version >= 0 else None
        else:
            most = -(-evaluation.num_members // batch)
            view = self.router.for_pass(evaluation.version, holders=evaluation.holders, most=most, num_out=num_out)
        if view is not None:
            evaluation.holders.add(view.index)
        return view
