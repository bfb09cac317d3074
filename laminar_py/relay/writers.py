"""Writers of a version: the ranks of a learner on the root's host, which write their shares of the same files.

A `Publisher` on each rank has a `Leader` (rank 0) or a `Follower`. They talk over Unix sockets whose name is in
the store, a folder private to the user, and only until all followers are there. Ranks on other hosts take part in
all but `gather` (`relay/remote_writers.py`). For each version, in this order:

    `share_files`  the leader makes the files; followers get its open descriptors of files that are new to them
    `agree`        every rank has copied; an error of one rank is raised on all
    `agree`        the rows of other hosts are in the files; only where there are other hosts
    `gather`       the leader gets each rank's checksums, on the thread that completes the version
    `agree`        the leader has renamed the folder

A follower shares the leader's descriptors instead of opening files itself. So the kernel still counts one process
that has a file open, and grants the leader its lease only if no other process uses the file. The end of a process
closes its connection, and each wait for it raises an error (`tests/relay/test_writers.py`).
"""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import msgspec

from laminar_py.records.codec import decode, encode
from laminar_py.relay.mapped_file import MappedFile, MappedFiles
from laminar_py.relay.stored_version import NoRoomError

SOCKET = "writers"  # in the store
LENGTH_BYTES = 8
MAX_DESCRIPTORS = 200  # in one message; the kernel allows 253


class RankMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's part of one exchange: its data, or its error."""

    error: str = ""
    no_room: bool = False  # the error is a `NoRoomError`
    data: bytes = b""


class Link(Protocol):
    """Messages from and to another rank. Raises `OSError` once that has ended."""

    def send(self, message: RankMessage) -> None:
        """Send a message."""
        ...

    def receive(self) -> RankMessage:
        """Wait for a message."""
        ...


class Leader:
    """Rank 0, which makes and completes versions, e.g. `Leader(store, followers=3)`; alone without followers.

    `remote` are links to the ranks on other hosts.
    """

    rank = 0

    def __init__(self, store: Path, *, followers: int, remote: Sequence[Link] = ()) -> None:
        self.ranks = followers + 1
        self._connections: list[_Connection] = []  # of ranks 1, 2, ..., once all are there
        self._remote = remote
        self._store = store
        (store / SOCKET).unlink(missing_ok=True)  # left by a process that was killed
        self._listener: socket.socket | None = None
        if followers:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with _address(store) as address:
                self._listener.bind(address)
            self._listener.listen(followers)

    def share_files(self, make: Callable[[], list[MappedFile]], known: MappedFiles) -> list[MappedFile]:
        """Return the files that `make` makes, and give them to followers. An error of `make` is raised on all."""
        self._accept()
        try:
            files = make()
        except Exception as error:
            self._send_all(failure(error))
            raise
        self._send_all(RankMessage(data=encode([pages.inode for pages in files])))
        for connection in self._connections:
            lacking = decode(list[int], connection.receive().data)
            connection.send_descriptors([files[index].descriptor for index in lacking])
        return files

    def agree(self, error: Exception | None, discard: Callable[[], None]) -> None:
        """Return once all ranks have called it; raise this rank's `error`, or an error of another rank.

        Calls `discard` before other ranks learn of an error: they then let go of deleted files.
        """
        own = [] if error is None else [failure(error)]
        failed = [one for one in own + self._answers([*self._connections, *self._remote]) if one.error]
        if failed:
            discard()
        self._send_all(failed[0] if failed else RankMessage())
        if error is not None:
            raise error
        if failed:
            raise raised(failed[0])

    def gather(self, work: Callable[[], bytes]) -> list[bytes]:
        """Return the results of `work` of the ranks on this host, by rank. Raises an error of any of them."""
        error: Exception | None = None
        try:
            own = work()
        except Exception as failed:  # noqa: BLE001 - followers send their results in any case
            error, own = failed, b""
        answers = self._answers(self._connections)
        for answer in answers:
            if error is None and answer.error:
                error = raised(answer)
        if error is not None:
            raise error
        return [own, *(answer.data for answer in answers)]

    def close(self) -> None:
        """Close the connections to followers, whose waits then raise an error."""
        if self._listener is not None:
            self._listener.close()
        (self._store / SOCKET).unlink(missing_ok=True)
        for connection in self._connections:
            connection.close()

    def _answers(self, links: Sequence[Link]) -> list[RankMessage]:
        """Receive a message of each rank; the end of its process counts as its error."""
        answers = []
        for link in links:
            try:
                answers.append(link.receive())
            except OSError as error:
                answers.append(RankMessage(error=str(error)))
        return answers

    def _accept(self) -> None:
        """Accept all followers, once."""
        if self._listener is None:
            return
        by_rank: dict[int, _Connection] = {}
        while len(by_rank) < self.ranks - 1:
            connection = _Connection(self._listener.accept()[0], "a rank of the learner")
            rank = int.from_bytes(connection.receive().data)
            connection.peer = f"rank {rank} of the learner"
            by_rank[rank] = connection
        self._connections = [by_rank[rank] for rank in sorted(by_rank)]
        self._listener.close()
        self._listener = None
        (self._store / SOCKET).unlink()

    def _send_all(self, message: RankMessage) -> None:
        for link in (*self._connections, *self._remote):
            with suppress(OSError):  # its end shows at the next receive
                link.send(message)


class Follower:
    """Another rank, which writes its share of each version, e.g. `Follower(store, rank=2, ranks=4)`.

    The leader of the store must exist already.
    """

    def __init__(self, store: Path, *, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _address(store) as address:
            connection.connect(address)
        self._leader = _Connection(connection, "rank 0 of the learner")
        self._leader.send(RankMessage(data=rank.to_bytes(LENGTH_BYTES)))

    def share_files(self, make: Callable[[], list[MappedFile]], known: MappedFiles) -> list[MappedFile]:
        """Return the files that the leader made, and keep new ones in `known`; `make` is the leader's part."""
        inodes = decode(list[int], receive_from(self._leader).data)
        lacking = [index for index, inode in enumerate(inodes) if not known.has(inode)]
        self._leader.send(RankMessage(data=encode(lacking)))
        for descriptor in self._leader.receive_descriptors(len(lacking)):
            known.adopt(descriptor)
        return [known.get(inode) for inode in inodes]

    def agree(self, error: Exception | None, discard: Callable[[], None]) -> None:
        """Return once all ranks have called it; raise this rank's `error`, or an error of another rank.

        `discard` is the leader's part.
        """
        agree_with(self._leader, error, rank=self.rank)

    def gather(self, work: Callable[[], bytes]) -> list[bytes]:
        """Send the result of this rank's `work` to the leader, or the error that it raised; return []."""
        try:
            answer = RankMessage(data=work())
        except Exception as error:
            self._leader.send(failure(error, rank=self.rank))
            raise
        self._leader.send(answer)
        return []

    def close(self) -> None:
        """Close the connection to the leader."""
        self._leader.close()


class _Connection:
    """Messages and descriptors of files over a socket. Raises `ConnectionError` once the peer has ended."""

    def __init__(self, connected: socket.socket, peer: str) -> None:
        self._socket = connected
        self.peer = peer

    def send(self, message: RankMessage) -> None:
        data = encode(message)
        self._socket.sendall(len(data).to_bytes(LENGTH_BYTES) + data)

    def receive(self) -> RankMessage:
        return decode(RankMessage, self._read(int.from_bytes(self._read(LENGTH_BYTES))))

    def send_descriptors(self, descriptors: Sequence[int]) -> None:
        for begin in range(0, len(descriptors), MAX_DESCRIPTORS):
            socket.send_fds(self._socket, [b"f"], descriptors[begin : begin + MAX_DESCRIPTORS])

    def receive_descriptors(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            byte, descriptors, *_ = socket.recv_fds(self._socket, 1, min(MAX_DESCRIPTORS, count - len(found)))
            if not byte:
                raise self._ended()
            found += descriptors
        return found

    def close(self) -> None:
        self._socket.close()

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            more = self._socket.recv(min(2**20, count - len(data)))
            if not more:
                raise self._ended()
            data += more
        return bytes(data)

    def _ended(self) -> ConnectionError:
        return ConnectionError(f"{self.peer} ended while a version was written")


@contextmanager
def _address(store: Path) -> Iterator[str]:
    """Yield a name for the socket in a store, however long the store's path: a Unix address has 107 bytes."""
    folder = os.open(store, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)


def failure(error: Exception, *, rank: int = 0) -> RankMessage:
    """Make the message about an error of a rank."""
    no_room = isinstance(error, NoRoomError)
    text = str(error) if no_room else f"rank {rank} of the learner: {error!r}"
    return RankMessage(error=text, no_room=no_room)


def raised(message: RankMessage) -> Exception:
    """Return the error that a message tells of."""
    return NoRoomError(message.error) if message.no_room else RuntimeError(message.error)


def receive_from(link: Link) -> RankMessage:
    """Receive a message; raise the error that it tells of, if any."""
    message = link.receive()
    if message.error:
        raise raised(message)
    return message


def agree_with(leader: Link, error: Exception | None, *, rank: int) -> None:
    """Tell the leader that this rank is done, or of its `error`; return once all ranks are done.

    Raises this rank's `error`, or an error of another rank.
    """
    leader.send(RankMessage() if error is None else failure(error, rank=rank))
    verdict = leader.receive()
    if error is not None:
        raise error
    if verdict.error:
        raise raised(verdict)
