"""Knowledge of the controller about each replica. Pure: no clock, no socket; shared by the parts of `control`.

Invariant: a view is a replica's last report, less what was sent since; a question has the answer that a look at
all views would give. They change by the methods here alone, each of which notes its replica; before the next
question those that have changed are put where they belong in the rankings, once each, so that what a report or an
assignment asks costs no look at all of them.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from typing import TypeAlias

Entry: TypeAlias = tuple[int, int]  # load and index of a replica


class Ranking:
    """Replicas of each version, the least loaded first, then the lowest index, e.g. `{7: [(0, 12), (3, 4)]}`."""

    def __init__(self) -> None:
        self._by_version: dict[int, list[Entry]] = {}  # none is empty
        self._places: dict[int, tuple[int, Entry]] = {}  # version and entry of each that is in it

    def put(self, index: int, version: int | None, *, load: int = 0) -> None:
        """Put a replica under a version, wherever it was before; None takes it out."""
        place = None if version is None else (version, (load, index))
        known = self._places.get(index)
        if place == known:
            return
        if known is not None:
            entries = self._by_version[known[0]]
            del entries[bisect_left(entries, known[1])]
            if not entries:
                del self._by_version[known[0]]
            del self._places[index]
        if place is not None:
            insort(self._by_version.setdefault(place[0], []), place[1])
            self._places[index] = place

    def of(self, version: int) -> Sequence[Entry]:
        """Replicas of a version."""
        return self._by_version.get(version, ())

    def below(self, version: int) -> Iterator[Entry]:
        """Replicas of all older versions, in order."""
        return merge(*(entries for known, entries in self._by_version.items() if known < version))

    @property
    def by_version(self) -> Mapping[int, Sequence[Entry]]:
        """Replicas of each version that has any."""
        return self._by_version


@dataclass(slots=True, kw_only=True)
class ReplicaView:
    """State of one replica as far as the controller knows: the last report, less what was sent since."""

    index: int
    has_place: bool = True  # False where its node has gone and no other has room: it does not come back
    in_doubt: bool = False  # it has joined, and its start failed: nothing waits for it until it reports
    leaving: bool = False  # it ends what it has, unless others take that over, and is given nothing new
    version: int = -1
    admissible: int = 0
    in_flight: set[str] = field(default_factory=set)
    sent: int = 0  # new trajectories in its life
    loading: int | None = None  # version that pinned work made it load, until it reports it

    @property
    def idle(self) -> bool:
        """True where it serves some version and has nothing to do."""
        return not self.in_flight and self.version >= 0

    @property
    def serving(self) -> int:
        """The version its next assignment runs under."""
        return self.version if self.loading is None else self.loading

    @property
    def counts(self) -> bool:
        """True where it runs or is sure to: it has a place, and is not in doubt."""
        return self.has_place and not self.in_doubt

    @property
    def starts(self) -> bool:
        """True where it counts, has served no version since it (re)started, and was given nothing."""
        return self.counts and not self.leaving and self.version < 0 and not self.in_flight


class ReplicaViews:
    """Views of all replicas, `by_index`; `sizes` are the numbers of trajectories that are handed out together."""

    def __init__(self, replicas: int, *, sizes: Collection[int]) -> None:
        self.by_index = {index: ReplicaView(index=index) for index in range(replicas)}
        self.in_flight = 0  # trajectories at replicas
        self._num_placed = replicas
        self._starting: set[int] = set()
        self._serving = Ranking()  # that have reported, by the version their next assignment runs under
        self._with_room = {size: Ranking() for size in sizes}  # that admit as many, and load nothing
        self._idle = Ranking()
        self._placed = Ranking()  # by the oldest version that each may still serve
        self._leaving = Ranking()  # about to leave, in no other ranking but `_placed`, by the version they serve
        self._changed = set(self.by_index)  # since they were ranked

    # ---- who is there

    def join(self, replica: int) -> None:
        """Take a new replica in, which has no place yet, or one back that was to leave."""
        view = self.by_index.setdefault(replica, ReplicaView(index=replica, has_place=False))
        self._num_placed += view.leaving and view.counts
        view.leaving = False
        self._changed.add(view.index)

    def leave(self, replica: int) -> None:
        """Give a replica nothing new: it is about to leave, and counts for no share."""
        view = self.by_index[replica]
        self._num_placed -= view.counts and not view.leaving
        view.leaving = True
        self._changed.add(view.index)

    # ---- what happens to a replica

    def reported(self, replica: int, *, version: int, admissible: int, received: int) -> None:
        """Take over a replica's own word on its state; what is still on its way to it counts as taken."""
        view = self.by_index[replica]
        self._num_placed += view.in_doubt and view.has_place and not view.leaving
        view.in_doubt = False
        view.version, view.admissible = version, admissible - (view.sent - received)
        if view.loading == version or not view.in_flight:
            view.loading = None
        self._changed.add(view.index)

    def send(self, replica: int, trajectory_id: str, *, pin: int | None = None) -> None:
        """Note what is handed over; `pin` is the only version it may run under."""
        view = self.by_index[replica]
        self.in_flight += trajectory_id not in view.in_flight
        view.in_flight.add(trajectory_id)
        if pin is None:
            view.sent += 1
            view.admissible -= 1
        elif pin != view.serving:
            view.loading = pin
        self._changed.add(view.index)

    def returned(self, replica: int, trajectory_id: str) -> None:
        """Note that a trajectory finished, was interrupted or dropped there."""
        view = self.by_index[replica]
        self.in_flight -= trajectory_id in view.in_flight
        view.in_flight.discard(trajectory_id)
        self._changed.add(view.index)

    def retire(self, replica: int) -> None:
        """Give nothing more to a replica that is about to be replaced."""
        view = self.by_index[replica]
        view.version, view.admissible = -1, 0
        self._changed.add(view.index)

    def forget(self, replica: int) -> set[str]:
        """Start anew with a replica that died; the trajectories it had."""
        before = self.by_index[replica]
        view = ReplicaView(
            index=replica, has_place=before.has_place, in_doubt=before.in_doubt, leaving=before.leaving
        )
        self.by_index[replica] = view
        self.in_flight -= len(before.in_flight)
        self._changed.add(view.index)
        return before.in_flight

    def doubt(self, replica: int) -> None:
        """Have one that joined and failed to start count as without a place until it reports."""
        view = self.by_index[replica]
        self._num_placed -= view.counts and not view.leaving
        view.in_doubt = True
        self._changed.add(view.index)

    def planned(self, has_place: Iterable[bool]) -> None:
        """Note for which replicas, in order, the cluster has room; where there is none, nothing waits for one.

        A replica that has just joined may be in no plan yet.
        """
        planned = dict(enumerate(has_place))
        for index, view in self.by_index.items():
            has = planned.get(index, False)
            if view.has_place != has:
                self._num_placed += 0 if view.leaving or view.in_doubt else 1 if has else -1
                view.has_place = has
                self._changed.add(view.index)

    def _settle(self) -> None:
        """Put all that have changed where they belong."""
        for index in self._changed:
            self._rank(self.by_index[index])
        self._changed.clear()

    def _rank(self, view: ReplicaView) -> None:
        index, load, version, stays = view.index, len(view.in_flight), view.version, not view.leaving
        self._serving.put(index, view.serving if stays and version >= 0 else None, load=load)
        for size, ranking in self._with_room.items():
            has_room = stays and view.loading is None and view.admissible >= size
            ranking.put(index, version if has_room else None, load=load)
        self._idle.put(index, version if stays and view.idle else None)
        serves = view.counts and (stays or version >= 0)
        self._placed.put(index, min(version, view.serving) if serves else None)
        self._leaving.put(index, view.serving if view.leaving and version >= 0 else None, load=load)
        if view.starts:
            self._starting.add(index)
        else:
            self._starting.discard(index)

    # ---- choices; of equals the first by index

    def with_room(self, size: int, *, oldest: int | None) -> ReplicaView | None:
        """The least loaded replica that admits `size` more, then the newest; of version `oldest` at least."""
        self._settle()
        firsts = [
            (entries[0][0], -version, entries[0][1])
            for version, entries in self._with_room[size].by_version.items()
            if oldest is None or version >= oldest
        ]
        return self.by_index[min(firsts)[-1]] if firsts else None

    def least_loaded(self, *, oldest: int) -> ReplicaView | None:
        """The least loaded replica that loads nothing, of version `oldest` at least."""
        self._settle()
        lists = (entries for version, entries in self._serving.by_version.items() if version >= oldest)
        firsts = [entry for entries in lists for entry in islice(filter(self._keeps, entries), 1)]
        return self.by_index[min(firsts)[1]] if firsts else None

    def that_serve(self, version: int) -> Iterator[ReplicaView]:
        """Replicas whose next assignment runs under `version`, the least loaded first."""
        self._settle()
        return (self.by_index[index] for _, index in self._serving.of(version))

    def leaving_that_serve(self, version: int) -> Iterator[ReplicaView]:
        """Replicas that are about to leave and serve `version`, for what nobody else can go on with."""
        self._settle()
        return (self.by_index[index] for _, index in self._leaving.of(version))

    def idle_below(self, version: int, *, expecting: Callable[[int], bool]) -> ReplicaView | None:
        """An idle replica of an older version, which is not `expecting` anything under that."""
        self._settle()
        return next((self.by_index[i] for _, i in self._idle.below(version) if not expecting(i)), None)

    def _keeps(self, entry: Entry) -> bool:
        return self.by_index[entry[1]].loading is None

    # ---- questions

    @property
    def num_placed(self) -> int:
        """Number of replicas that run or will, and stay; one at least."""
        return max(1, self._num_placed)

    def serves(self, replica: int, version: int) -> bool:
        """True where it can take up work of `version` at once."""
        view = self.by_index[replica]
        return view.version == version and view.loading is None and not view.leaving

    def is_unreachable(self, version: int) -> bool:
        """True where no replica will ever serve `version` again: all are beyond it, and none is starting.

        One in doubt counts for none of them. Where none has a place the run ends, and nothing is given up that a
        resumed one can go on with. One that leaves still serves its version to what nobody else can go on with.
        """
        self._settle()
        return min(self._placed.by_version, default=version) > version

    def num_starting(self) -> int:
        """Number of replicas that have served no version since they (re)started and were given nothing."""
        self._settle()
        return len(self._starting)

    def by_version(self) -> dict[int, list[ReplicaView]]:
        """Replicas that have work and stay, by the version that they serve; a look at all, once a repack round."""
        out: dict[int, list[ReplicaView]] = {}
        for view in self.by_index.values():
            if view.in_flight and view.version >= 0 and view.loading is None and not view.leaving:
                out.setdefault(view.version, []).append(view)
        return out

    def running(self, replica: int | None) -> ReplicaView | None:
        """View of a replica that has reported since it started, else None."""
        view = None if replica is None else self.by_index[replica]
        return view if view is not None and view.version >= 0 else None
