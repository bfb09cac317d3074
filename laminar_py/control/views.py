"""The controller's view of each replica, and rankings of replicas by version and load. Pure; shared in `control`.

A view is a replica's last report, updated by the assignments sent since. A change only marks its replica. The next
query re-ranks the marked replicas first, so that a report or an assignment never looks at all replicas. A query
answers as if it looked at all views (`tests/control/test_views.py`).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from typing import TypeAlias

Entry: TypeAlias = tuple[int, int]  # load and index of a replica


class Ranking:
    """Replicas by version, least loaded first, then lowest index.

    E.g. `{7: [(0, 12), (3, 4)]}`: under version 7 replica 12 has load 0, and replica 4 has load 3.
    """

    def __init__(self) -> None:
        self.by_version: dict[int, list[Entry]] = {}  # without empty lists
        self._places: dict[int, tuple[int, Entry]] = {}  # version and entry of each replica

    def put(self, index: int, version: int | None, *, load: int = 0) -> None:
        """Replace the entry of replica `index`, if any, by this version and load; version None removes it."""
        ranked = None if version is None else (version, (load, index))
        known = self._places.get(index)
        if ranked == known:
            return
        if known is not None:
            entries = self.by_version[known[0]]
            del entries[bisect_left(entries, known[1])]
            if not entries:
                del self.by_version[known[0]]
            del self._places[index]
        if ranked is not None:
            insort(self.by_version.setdefault(ranked[0], []), ranked[1])
            self._places[index] = ranked


@dataclass(slots=True, kw_only=True)
class ReplicaView:
    """One replica as the controller knows it: its last report, updated by the assignments sent since."""

    index: int
    has_place: bool = True  # False: its node is gone and no other has room, so it cannot restart
    leaving: bool = False  # it gets no new work; its trajectories finish or move
    version: int = -1  # last reported; -1 before the first load
    admissible: int = 0  # new trajectories that it accepts
    in_flight: set[str] = field(default_factory=set)  # ids of assigned trajectories that it has not returned
    sent: int = 0  # new trajectories assigned since it started
    loading: int | None = None  # version that pinned work makes it load, until it reports the version

    @property
    def idle(self) -> bool:
        """Whether it serves some version and runs nothing."""
        return not self.in_flight and self.version >= 0

    @property
    def serving(self) -> int:
        """The version under which its next assignment will run; -1 before the first load."""
        return self.version if self.loading is None else self.loading

    @property
    def starts(self) -> bool:
        """Whether it is starting or restarting: it has a place, but has not served a version or got work yet."""
        return self.has_place and not self.leaving and self.version < 0 and not self.in_flight


class ReplicaViews:
    """Views of all replicas, `by_index`; `sizes` has the numbers of trajectories for which `with_room` can ask."""

    def __init__(self, replicas: int, *, sizes: Collection[int]) -> None:
        self.by_index = {index: ReplicaView(index=index) for index in range(replicas)}
        self.in_flight = 0  # trajectories at all replicas
        self._num_placed = replicas  # with a place, without leaving replicas
        self._starting: set[int] = set()
        self._serving = Ranking()  # reported replicas, by the version of their next assignment
        self._with_room = {size: Ranking() for size in sizes}  # replicas that admit `size` more and load nothing
        self._idle = Ranking()
        self._placed = Ranking()  # replicas with a place, by the oldest version that each may still serve
        self._leaving = Ranking()  # leaving replicas, by served version; no other ranking but `_placed` has them
        self._changed = set(self.by_index)  # since the last ranking

    # ---- replicas that join and leave

    def join(self, replica: int) -> None:
        """Add a new replica, which has no place yet."""
        self.by_index[replica] = ReplicaView(index=replica, has_place=False)
        self._changed.add(replica)

    def leave(self, replica: int) -> None:
        """Mark a replica as leaving: it gets no new work and no share of a batch."""
        view = self.by_index[replica]
        self._num_placed -= view.has_place and not view.leaving
        view.leaving = True
        self._changed.add(view.index)

    # ---- what happens to a replica

    def reported(self, replica: int, *, version: int, admissible: int, received: int) -> None:
        """Note a replica's report; new trajectories sent but not yet `received` reduce its `admissible` places."""
        view = self.by_index[replica]
        view.version, view.admissible = version, admissible - (view.sent - received)
        if view.loading == version or not view.in_flight:
            view.loading = None
        self._changed.add(view.index)

    def send(self, replica: int, trajectory_id: str, *, pin: int | None = None) -> None:
        """Note that a trajectory was assigned to a replica, which loads version `pin` for it if that differs.

        Without a pin the trajectory is new, and takes one of the replica's admissible places.
        """
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
        """Note that a trajectory finished, was interrupted or was dropped at a replica."""
        view = self.by_index[replica]
        self.in_flight -= trajectory_id in view.in_flight
        view.in_flight.discard(trajectory_id)
        self._changed.add(view.index)

    def retire(self, replica: int) -> None:
        """Mark a crashed replica as serving no version, so that it gets no work; its trajectories stay noted."""
        view = self.by_index[replica]
        view.version, view.admissible = -1, 0
        self._changed.add(view.index)

    def forget(self, replica: int) -> set[str]:
        """Reset a crashed replica's view, except its place and whether it leaves; return its trajectories' ids."""
        before = self.by_index[replica]
        view = ReplicaView(index=replica, has_place=before.has_place, leaving=before.leaving)
        self.by_index[replica] = view
        self.in_flight -= len(before.in_flight)
        self._changed.add(view.index)
        return before.in_flight

    def planned(self, has_place: Iterable[bool]) -> None:
        """Note for each replica, in order of index, whether the cluster has a place for it.

        A replica that joined after the plan was made has none. Trajectories wait only for replicas with a place.
        """
        planned = dict(enumerate(has_place))
        for index, view in self.by_index.items():
            has = planned.get(index, False)
            if view.has_place != has:
                self._num_placed += 0 if view.leaving else 1 if has else -1
                view.has_place = has
                self._changed.add(view.index)

    def _rank_changed(self) -> None:
        """Enter each changed replica in the rankings that it qualifies for now, and remove it from all others.

        A leaving replica is ranked in `_leaving`, and in `_placed` once it serves a version.
        """
        for index in self._changed:
            view = self.by_index[index]
            load, version, stays = len(view.in_flight), view.version, not view.leaving
            self._serving.put(index, view.serving if stays and version >= 0 else None, load=load)
            for size, ranking in self._with_room.items():
                has_room = stays and view.loading is None and view.admissible >= size
                ranking.put(index, version if has_room else None, load=load)
            self._idle.put(index, version if stays and view.idle else None)
            serves = view.has_place and (stays or version >= 0)
            self._placed.put(index, min(version, view.serving) if serves else None)
            self._leaving.put(index, view.serving if view.leaving and version >= 0 else None, load=load)
            if view.starts:
                self._starting.add(index)
            else:
                self._starting.discard(index)
        self._changed.clear()

    # ---- choices; among equals the lowest index

    def with_room(self, size: int, *, oldest: int | None) -> ReplicaView | None:
        """Return the least loaded, then newest replica that admits `size` more at `oldest` or newer, or None."""
        self._rank_changed()
        firsts = [
            (entries[0][0], -version, entries[0][1])
            for version, entries in self._with_room[size].by_version.items()
            if oldest is None or version >= oldest
        ]
        return self.by_index[min(firsts)[-1]] if firsts else None

    def least_loaded(self, *, oldest: int) -> ReplicaView | None:
        """Return the least loaded replica that serves version `oldest` or newer and loads no other, or None."""
        self._rank_changed()
        lists = (entries for version, entries in self._serving.by_version.items() if version >= oldest)
        firsts = [next((one for one in ranked if self.by_index[one[1]].loading is None), None) for ranked in lists]
        found = min(filter(None, firsts), default=None)
        return self.by_index[found[1]] if found else None

    def that_serve(self, version: int) -> Iterator[ReplicaView]:
        """Iterate over replicas whose next assignment runs under `version`, least loaded first."""
        self._rank_changed()
        return (self.by_index[index] for _, index in self._serving.by_version.get(version, ()))

    def leaving_that_serve(self, version: int) -> Iterator[ReplicaView]:
        """Iterate over leaving replicas that serve `version`, for work that no other replica can continue."""
        self._rank_changed()
        return (self.by_index[index] for _, index in self._leaving.by_version.get(version, ()))

    def idle_below(self, version: int, *, expecting: Callable[[int], bool]) -> ReplicaView | None:
        """Return an idle replica of an older version for which `expecting(index)` is false, or None."""
        self._rank_changed()
        older = merge(*(entries for known, entries in self._idle.by_version.items() if known < version))
        return next((self.by_index[i] for _, i in older if not expecting(i)), None)

    # ---- questions

    @property
    def num_placed(self) -> int:
        """Number of replicas that have a place and do not leave; 1 if there are none."""
        return max(1, self._num_placed)

    def serves(self, replica: int, version: int) -> bool:
        """Whether a replica can run work of `version` at once: it serves the version, loads no other and stays."""
        view = self.by_index[replica]
        return view.version == version and view.loading is None and not view.leaving

    def is_unreachable(self, version: int) -> bool:
        """Whether no replica will serve `version` again: all serve newer versions, and none is starting.

        A leaving replica counts. If no replica has a place the answer is False: the run ends, and its resumed run
        can continue the trajectories.
        """
        self._rank_changed()
        return min(self._placed.by_version, default=version) > version

    def num_serving(self, version: int) -> int:
        """Return the number of replicas whose next assignment runs under `version`, without leaving ones."""
        self._rank_changed()
        return len(self._serving.by_version.get(version, ()))

    def num_starting(self) -> int:
        """Return the number of starting replicas."""
        self._rank_changed()
        return len(self._starting)

    def by_version(self) -> dict[int, list[ReplicaView]]:
        """Return the replicas that have work, stay, and load nothing, by served version. Reads all views."""
        out: dict[int, list[ReplicaView]] = {}
        for view in self.by_index.values():
            if view.in_flight and view.version >= 0 and view.loading is None and not view.leaving:
                out.setdefault(view.version, []).append(view)
        return out
