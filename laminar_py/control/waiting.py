"""Trajectories that wait for a replica: interrupted ones, replacements, evaluations. Owned by `control.scheduler`.

The queue decides which goes where and when; the dispatcher hands them over. They wait in lanes, by what they need
of a replica. Where the first of a lane finds no place nobody behind it does, so a look costs as much as there are
lanes, however many wait. Invariant: a trajectory leaves the queue once, either to a replica or, where no replica
will ever serve its version again, as unreachable.

`Router` chooses the replica, within what admission and moves allow. Invariant: a replica is never given more new
samples than it said it admits; a trajectory pinned to a version goes only to a replica that serves it, or that is
idle and can load it, since an engine's versions never go back; and a group's new samples go to one replica, which
prefills their prompt once.
"""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TypeAlias

from laminar_py.control.book import Book, Phase
from laminar_py.control.evaluation import Evaluation, Evaluations
from laminar_py.control.settings import Admission
from laminar_py.control.views import ReplicaView
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.trajectory import Kind


class Router:
    """Rules by which a replica is chosen of those there are at the moment; changes nothing."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._views = book.views

    @property
    def _admission(self) -> Admission:
        return self._book.settings.admission  # whose capacity follows the number of replicas

    @property
    def num_admitted(self) -> int:
        """Groups that may be issued now; a step with too few counts as a full one, so what follows is no older."""
        book = self._book
        if book.phase is not Phase.ADMITTING or (self._admission.by_batch and book.at_ceiling):
            return 0
        return self._admission.allowed(live=len(book.groups) + book.num_missing, generating=book.num_generating)

    @property
    def _oldest(self) -> int | None:
        """Version that a trajectory without tokens must have at least."""
        return self._admission.oldest(self._book.newest_version, self._book.ages)

    def for_new(self, size: int) -> ReplicaView | None:
        """The least loaded replica that admits `size` more under a version that is new enough.

        Where whole batches are waited for, each replica has a share, so that one that reports early does not
        take a whole batch before the others have the weights for it.
        """
        groups = self._admission.share(self._views.num_placed)
        view = self._views.with_room(size, oldest=self._oldest)
        if view is None or groups is None:
            return view
        return view if len(view.in_flight) + size <= groups * self._book.settings.group_size else None

    def for_displaced(self) -> ReplicaView | None:
        """A replica for one trajectory of a replica that died: if none admits more, the least loaded."""
        return self.for_new(1) or self._views.least_loaded(oldest=max(0, self._oldest or 0))

    def for_pinned(self, version: int, *, limit: int | None = None) -> ReplicaView | None:
        """A replica that can continue work of `version`: one that serves it, else an idle one that is older.

        A replica that expects moves does not leave the version that it serves; one that has `limit` trajectories,
        where there is one, gets no more. One that leaves takes what nobody else can.
        """
        first = next(self._views.that_serve(version), None)
        if first is not None and (limit is None or len(first.in_flight) < limit):
            return first
        return self._idle_below(version) or next(self._views.leaving_that_serve(version), None)

    def for_pass(self, version: int, *, holders: Collection[int], most: int, num_out: int) -> ReplicaView | None:
        """A replica for a member of an evaluation of `version`, of which `num_out` are at the `holders`.

        One that has none yet, while the holders that still serve it are fewer than `most`; else the least loaded
        of these, unless they have a batch each. Replicas that leave are for what nobody else can take.
        """
        serving = [view for view in map(self._views.by_index.__getitem__, holders) if _serves(view, version)]
        holding = [view for view in serving if not view.leaving] or serving
        if sum(not view.leaving for view in holding) < most:
            others = (view for view in self._views.that_serve(version) if view.index not in holders)
            other = next(others, None) or self._idle_below(version)
            other = other or (None if holding else next(self._views.leaving_that_serve(version), None))
            if other is not None:
                return other
        is_full = num_out >= len(holding) * self._book.settings.batch_per_replica
        least = min(holding, key=lambda view: (len(view.in_flight), view.index), default=None)
        return None if is_full else least

    def _idle_below(self, version: int) -> ReplicaView | None:
        """A replica that can load it, and expects no moves under the version that it serves."""
        return self._views.idle_below(version, expecting=self._book.moves.expected)


def _serves(view: ReplicaView, version: int) -> bool:
    return view.version >= 0 and view.serving == version


Need: TypeAlias = str | int | None  # a version; the place of an evaluation or of a move, by its id; any place


@dataclass(slots=True, eq=False)
class Lane:
    """Trajectories of one need, first come first served, e.g. those that go on under version 7.

    Where replicas that start divide them among themselves, no replica is given more than its share.
    """

    entries: list[tuple[int, LiveTrajectory]] = field(default_factory=list)  # a heap, by when they came
    share: int | None = None  # trajectories in flight; None: the lane is not divided


class WaitingQueue:
    """First come first served, but for those displaced by a replica's death, which go before all others."""

    def __init__(self, book: Book, *, router: Router, evaluations: Evaluations) -> None:
        self._book = book
        self._router = router
        self._evaluations = evaluations
        self._lanes: dict[Need, Lane] = {}  # none is empty; in all of them at most all live
        self._arrivals = count()
        self._displaced: list[LiveTrajectory] = []
        self._unreachable: list[LiveTrajectory] = []

    def append(self, trajectory: LiveTrajectory) -> None:
        """Queue a trajectory."""
        self._insert(next(self._arrivals), trajectory)

    def append_displaced(self, trajectory: LiveTrajectory) -> None:
        """Queue a trajectory whose replica died; for it a replica need not admit more."""
        self._displaced.append(trajectory)

    def extend(self, trajectories: Iterable[LiveTrajectory]) -> None:
        """Queue several trajectories."""
        for trajectory in trajectories:
            self.append(trajectory)

    def remove_group(self, group_id: str) -> None:
        """Remove all members of a group."""
        self._keep(lambda trajectory: trajectory.group_id != group_id)

    def _keep(self, stays: Callable[[LiveTrajectory], bool]) -> None:
        self._displaced = [item for item in self._displaced if stays(item)]
        self._unreachable = [item for item in self._unreachable if stays(item)]
        for need, lane in list(self._lanes.items()):
            kept = [entry for entry in lane.entries if stays(entry[1])]
            if not kept:
                del self._lanes[need]
            elif len(kept) < len(lane.entries):
                lane.entries = kept
                heapify(kept)

    def remove(self, trajectory_ids: Container[str]) -> None:
        """Remove these, wherever they wait."""
        self._keep(lambda trajectory: trajectory.id not in trajectory_ids)

    def has_of(self, pass_id: str) -> bool:
        """True while members of that pass wait."""
        return pass_id in self._lanes

    def take_unreachable(self) -> list[LiveTrajectory]:
        """Trajectories whose version no replica will serve again; each is told once."""
        unreachable, self._unreachable = self._unreachable, []
        return unreachable

    def pin(self, trajectory: LiveTrajectory) -> int | None:
        """The only version that a trajectory may go on under, if there is one."""
        if trajectory.kind is Kind.EVAL:
            return self._evaluations.version_of(trajectory)
        return trajectory.last_version if self._book.settings.one_version else None

    def leave(self) -> Iterator[tuple[LiveTrajectory, int, int | None]]:
        """Trajectories that go to a replica now: each with the replica and the version it must have there, if any.

        Every one is to be sent before the next is asked for.
        """
        displaced, self._displaced = self._displaced, []
        for trajectory in displaced:
            view = self._router.for_displaced() if self._is_free(trajectory) else None
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
            view, pin = self._place(trajectory, lane) if self._book.may_run(trajectory) else (None, None)
            if view is not None:
                self._take(need)
                if need in self._lanes:
                    heappush(heads, (lane.entries[0][0], need))
                yield trajectory, view.index, pin
            elif pin is not None and self._book.views.is_unreachable(pin):
                self._unreachable += [trajectory for _, trajectory in sorted(self._lanes.pop(need).entries)]
            elif self._need(trajectory) != need:  # its move is off
                self._take(need)
                self._insert(arrival, trajectory)

    def leave_for_starting(self) -> Iterator[tuple[LiveTrajectory, int]]:
        """Trajectories that go, and under which version, to a replica that starts: those that nobody else serves.

        Replicas that start together share the versions: of 3, 4, 5 the first of two gets 3 and 5; where they are
        more than the versions, each gets its share of one.
        """
        self.extend(self._displaced)
        self._displaced = []
        pinned: dict[int, list[Need]] = {}
        for need, lane in self._lanes.items():
            pin = self.pin(lane.entries[0][1])
            if pin is not None and self._book.may_run(lane.entries[0][1]):
                pinned.setdefault(pin, []).append(need)
        num_starting = max(1, self._book.views.num_starting())
        unserved = {version: pinned[version] for version in sorted(pinned) if self._is_unserved(version, pinned)}
        leaving: list[tuple[int, LiveTrajectory]] = []
        room = self._book.settings.batch_per_replica
        for version in list(unserved)[::num_starting]:
            replicas = self._replicas_for(version, unserved, num_starting)
            for need in unserved[version]:
                num_leaving = self._divide(self._lanes[need], replicas)
                if not self._passes_once(self._lanes[need], version):
                    num_leaving = min(room, num_leaving)
                    room -= num_leaving
                leaving += [self._take(need) for _ in range(num_leaving)]
        for _, trajectory in sorted(leaving):
            pin = self.pin(trajectory)
            assert pin is not None, f"{trajectory.id} goes on under any version"
            yield trajectory, pin

    # ---- dividing a version among replicas that start

    def _replicas_for(self, version: int, unserved: Mapping[int, list[Need]], num_starting: int) -> int:
        """How many of the replicas that start a version gets: by how many wait for it, one at least."""
        waiting = {
            other: sum(len(self._lanes[need].entries) for need in needs if need in self._lanes)
            for other, needs in unserved.items()
        }
        replicas = round(num_starting * waiting[version] / sum(waiting.values()))
        return max(1, min(replicas, num_starting - len(unserved) + 1))

    def _divide(self, lane: Lane, replicas: int) -> int:
        """Trajectories of a lane for one of so many replicas; from here on each has no more of them.

        A share is no smaller than a group, whose prompt is prefilled once.
        """
        settings, version = self._book.settings, self.pin(lane.entries[0][1])
        lane.share = max(settings.group_size, -(-len(lane.entries) // replicas))
        if not self._passes_once(lane, version):
            lane.share = min(settings.batch_per_replica, lane.share)
        return min(lane.share, len(lane.entries))

    def _passes_once(self, lane: Lane, version: int | None) -> bool:
        """True for deferred evaluations, and those that a resumed run takes up before its learner has published.

        Replicas pass through their versions in order, and never come back. So they are given all of them when they
        start; more than a batch waits in their engines.
        """
        evaluated, newest = lane.entries[0][1].kind is Kind.EVAL, self._book.newest_version
        return evaluated and version is not None and (version < newest or newest < 0)

    def _limit(self, lane: Lane) -> int | None:
        """Trajectories in flight with which a replica gets no more of a lane; the rest waits for others."""
        if lane.share is None:
            return None
        return lane.share if self._book.views.num_starting() else self._book.settings.batch_per_replica

    def _is_unserved(self, version: int, pinned: Mapping[int, list[Need]]) -> bool:
        lanes = (self._lanes[need] for need in pinned[version])
        return any(self._router.for_pinned(version, limit=self._limit(lane)) is None for lane in lanes)

    # ---- lanes

    def _need(self, trajectory: LiveTrajectory) -> Need:
        if self._book.moves.destination(trajectory.id) is not None:
            return trajectory.id
        return trajectory.group_id if trajectory.kind is Kind.EVAL else self.pin(trajectory)

    def _insert(self, arrival: int, trajectory: LiveTrajectory) -> None:
        lane = self._lanes.setdefault(self._need(trajectory), Lane())
        heappush(lane.entries, (arrival, trajectory))

    def _take(self, need: Need) -> tuple[int, LiveTrajectory]:
        """The first of a lane, which leaves it."""
        entries = self._lanes[need].entries
        if len(entries) == 1:
            del self._lanes[need]
        return heappop(entries)

    def _is_free(self, trajectory: LiveTrajectory) -> bool:
        """True where any replica will do."""
        bound = self.pin(trajectory) is not None or self._book.moves.destination(trajectory.id) is not None
        return trajectory.kind is Kind.TRAIN and not bound and self._book.may_run(trajectory)

    def _place(self, trajectory: LiveTrajectory, lane: Lane) -> tuple[ReplicaView | None, int | None]:
        """The replica for a trajectory, if there is a place now; and its version, if only one will do."""
        move, pin = self._book.moves.destination(trajectory.id), self.pin(trajectory)
        if move is not None:
            if self._book.views.serves(*move):
                return self._book.views.by_index[move[0]], move[1]
            self._book.moves.ends(trajectory.id)
        if trajectory.kind is Kind.EVAL and self._evaluations.pass_of(trajectory).replica is not None:
            return self._place_beside_training(self._evaluations.pass_of(trajectory), lane), pin
        if pin is not None:
            return self._router.for_pinned(pin, limit=self._limit(lane)), pin
        return self._router.for_new(1), None

    def _place_beside_training(self, evaluation: Evaluation, lane: Lane) -> ReplicaView | None:
        """A replica for a member of a pass, which keeps its replicas from newer weights while it lasts.

        So it has as few as can hold it with a batch each; until its first token tells the version, one.
        """
        batch = self._book.settings.batch_per_replica
        num_out = len(evaluation.pending) - len(lane.entries)
        if evaluation.version is None:
            view = self._book.views.running(evaluation.replica) if num_out < batch else None
        else:
            most = -(-evaluation.num_members // batch)
            view = self._router.for_pass(
                evaluation.version, holders=evaluation.holders, most=most, num_out=num_out
            )
        if view is not None:
            evaluation.holders.add(view.index)
        return view
