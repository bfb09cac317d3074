"""The versions that arrive at one node: which to fetch, which to leave for a newer one, what has come of each.

Used by the node alone, which hands over what the parent says. Invariant: the newest version wins, but one of two
is always brought to its end, however fast they are published; and a version that the next one builds on is, too.
"""

import logging
from collections.abc import Callable, Collection
from enum import Enum

from laminar_py.relay.node.downlink import Downlink
from laminar_py.relay.node.intake import BrokenVersionError, ChunkOutcome, Intake, window_of
from laminar_py.relay.store.digests import version_digest
from laminar_py.relay.store.version import NoRoomError, StoredVersion
from laminar_py.relay.store.versions import Store
from laminar_py.relay.wire import messages as m

log = logging.getLogger(__name__)

MOST_DOUBLINGS = 10  # of the pause before what failed is tried again: an hour and a half


class Answer(Enum):
    """Answer of a node to an announced version."""

    BEGIN = "begin"
    GO_ON = "go on"  # it arrives here: what is missing is asked for anew
    LATER = "later"  # when that has come which may not be abandoned for it
    DECLINE = "decline"  # it is here, or nobody needs it any more


def answer(
    announce: m.Announce,
    *,
    complete: Collection[int],
    arriving: Collection[int],
    waiting: int | None,
    wanted: bool,
    overtook: int | None,
) -> Answer:
    """Decide about a version, given those that are `complete` and `arriving`.

    `waiting`: one that comes later. `wanted`: somebody below asked for this one by number. `overtook`: the one for
    which another was abandoned.
    """
    version = announce.manifest.version
    if version in arriving:
        return Answer.GO_ON
    if version in complete or not (wanted or version > max((*complete, *arriving), default=-1)):
        return Answer.DECLINE
    builds_on_it = announce.base is not None and (announce.base in arriving or announce.base == waiting)
    if not wanted and (overtook in arriving or builds_on_it):
        return Answer.LATER
    return Answer.BEGIN


class Arrivals:
    """Versions that arrive at one node.

    `tell` speaks to the parent, `is_wanted` is asked of a version number, `finished` gets what is complete and
    verified, `discard` the folder of what will not come, `give_up` a version and why it cannot be had.
    """

    def __init__(
        self,
        store: Store,
        downlink: Downlink,
        *,
        chunk_bytes: int,
        tell: Callable[[m.Upward], None],
        is_wanted: Callable[[int], bool],
        finished: Callable[[Intake], None],
        discard: Callable[[StoredVersion], None],
        give_up: Callable[[int, str], None],
        now: Callable[[], float],
    ) -> None:
        self._store = store
        self._downlink = downlink
        self._chunk_bytes = chunk_bytes
        self._tell = tell
        self._is_wanted = is_wanted
        self._finished = finished
        self._discard = discard
        self._give_up = give_up
        self._now = now
        self._intakes: dict[int, Intake] = {}
        self._overtook: int | None = None  # version that arrives in place of one that was abandoned for it
        self._next: m.Announce | None = None  # the newest of those that come later
        self._given_up = -1  # the highest version that could not be had
        self._failures = 0  # of that version
        self._pause = 0  # reminders before it may be announced again: twice as many each time

    def __contains__(self, version: int) -> bool:
        return version in self._intakes

    def __len__(self) -> int:
        return len(self._intakes)

    @property
    def newest(self) -> int:
        """The highest version that is complete here or arrives, -1 if there is none."""
        return max(self._store.newest, *self._intakes, -1)

    @property
    def bases(self) -> set[int]:
        """Versions that arriving ones build on."""
        return {intake.stored.base for intake in self._intakes.values() if intake.stored.base is not None}

    def find(self, version: int) -> StoredVersion | None:
        """The version, if it arrives."""
        return self._intakes[version].stored if version in self._intakes else None

    def greet(self) -> None:
        """The parent is new, or as good as new: ask for what arrives."""
        self._next, self._pause = None, 0  # they will be announced again
        for version in self._intakes:
            self._tell(m.Want(version))

    def remind(self) -> None:
        """Tell the parent what was heard of, and ask anew for what does not come."""
        waiting = -1 if self._waiting is None else self._waiting
        given_up = self._given_up if self._pause > 0 else -1
        self._tell(m.Attach(max(self.newest, waiting, given_up)))
        self._pause -= 1
        for intake in self._intakes.values():
            for fetch in intake.overdue():
                self._tell(fetch)

    def gave_up(self, version: int) -> None:
        """Note that a version cannot be had here now; perhaps later, when there is room again."""
        if version >= self._given_up:
            self._failures = self._failures + 1 if version == self._given_up else 1
            self._given_up = version
            self._pause = 2 ** min(self._failures, MOST_DOUBLINGS)

    @property
    def _waiting(self) -> int | None:
        return None if self._next is None else self._next.manifest.version

    def announced(self, announce: m.Announce) -> None:
        """The parent has a version, or a part of it."""
        version = announce.manifest.version
        reply = answer(
            announce,
            complete=self._store.complete,
            arriving=self._intakes,
            waiting=self._waiting,
            wanted=self._is_wanted(version),
            overtook=self._overtook,
        )
        match reply:
            case Answer.BEGIN:
                try:
                    self._begin(announce)
                except (NoRoomError, BrokenVersionError) as error:
                    self._give_up(version, str(error))
            case Answer.GO_ON:
                self._intakes[version].restart()
                self._ask(self._intakes[version])
            case Answer.LATER:
                self._next = announce
                for arriving in self._intakes.keys() & {self._overtook, announce.base}:
                    self._tell(m.Want(arriving, arriving=True))  # the parent may not abandon it either
            case Answer.DECLINE:
                self._tell(m.Done(version))
                self._compare(announce.manifest)

    def received(self, chunk: m.Chunk) -> None:
        """A chunk has come."""
        intake = self._intakes.get(chunk.version)
        if intake is None:
            return  # overtaken while it was on its way
        try:
            self._take(intake, chunk)
        except (NoRoomError, BrokenVersionError) as error:
            self._give_up(chunk.version, str(error))

    def drop(self, version: int) -> None:
        """A version will not come."""
        intake = self._intakes.pop(version, None)
        if intake is not None:
            self._downlink.forget(version)
            self._discard(intake.stored)

    def begin_next(self) -> None:
        """Something came to its end: turn to what was left for later."""
        announce, self._next = self._next, None
        if announce is not None:
            self.announced(announce)

    def _begin(self, announce: m.Announce) -> None:
        manifest = announce.manifest
        self._check(manifest)
        overtaken = []
        if manifest.version > self.newest:  # latest wins
            overtaken = [intake.stored for intake in self._intakes.values() if not self._is_wanted(intake.version)]
        self._store.check_room(manifest, given_back=sum(stored.allocated for stored in overtaken))
        for stored in overtaken:
            self.drop(stored.manifest.version)
            self._tell(m.Done(stored.manifest.version))
            self._overtook = manifest.version
        if self._overtook == manifest.version:
            self._tell(m.Want(manifest.version, arriving=True))  # the parent may not abandon it either
        base = None if announce.base is None else self._store.complete.get(announce.base)
        if base is not None and not manifest.fits(base.manifest):
            base = None
        stored = self._store.begin(manifest)
        intake = Intake(stored, window=window_of(manifest.chunk_bytes), now=self._now, base=base)
        self._intakes[manifest.version] = intake
        self._downlink.announce(stored, newest=manifest.version == self.newest)
        self._ask(intake)

    def _check(self, manifest: m.Manifest) -> None:
        if manifest.digest != version_digest(manifest.files):
            raise BrokenVersionError(f"version {manifest.version}: its digest is not that of its files")
        if len({entry.name for entry in manifest.files}) < len(manifest.files):
            raise BrokenVersionError(f"version {manifest.version}: two of its files have one name")
        if manifest.chunk_bytes > self._chunk_bytes:
            raise BrokenVersionError(
                f"version {manifest.version} was cut into chunks of {manifest.chunk_bytes} bytes, above the"
                f" {self._chunk_bytes} of this node; start the publisher and all nodes with the same"
            )

    def _take(self, intake: Intake, chunk: m.Chunk) -> None:
        outcome = intake.accept(chunk, keep_delta=self._downlink.has_children)
        if outcome is ChunkOutcome.DAMAGED:
            self._tell(m.Fetch(version=chunk.version, file=chunk.file, first_chunk=chunk.index, credits=1))
        if outcome is not ChunkOutcome.WRITTEN:
            return
        self._downlink.forward(intake.stored, chunk.file, chunk.index)
        if intake.stored.has_file(chunk.file):
            intake.judge_file(chunk.file)
        if intake.verified:
            if not intake.stored.is_whole():
                raise BrokenVersionError(f"version {intake.version}: files of it were deleted while it arrived")
            self._store.commit(intake.stored)
            del self._intakes[intake.version]
            self._tell(m.Done(intake.version))
            self._finished(intake)
            self.begin_next()
        else:
            self._ask(intake)

    def _ask(self, intake: Intake) -> None:
        for fetch in intake.grant():
            self._tell(fetch)

    def _compare(self, manifest: m.Manifest) -> None:
        """A number names one content alone."""
        here = self._store.complete.get(manifest.version)
        if here is not None and here.manifest.digest != manifest.digest:
            log.error(
                "version %d is here as %s, and the parent has it as %s: publish under a number of its own",
                manifest.version,
                here.manifest.digest,
                manifest.digest,
            )
