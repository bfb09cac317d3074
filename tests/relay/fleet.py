"""Relay nodes in processes of their own that misbehave on command: they die, hang, damage chunks, send slowly."""

import asyncio
import logging
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import msgspec
import psutil

from laminar_py.relay.messages import Chunk, Downward, RelayKeys
from laminar_py.relay.node import RelayNode
from laminar_py.relay.sockets import Listener

START_S = 20.0

log = logging.getLogger("events")


class Mischief(msgspec.Struct, frozen=True):
    """What a node does wrong from now on, e.g. `Mischief(flips=3)`."""

    flips: int = 0  # so many chunks leave it damaged
    delay_s: float = 0.0  # it stands still so long before each chunk
    losses: int = 0  # so many records of any kind, of each two, do not leave it


class Member:
    """One node: `start()`, then any fault, then `start()` again, on the port it had. Its words are in `log`."""

    def __init__(
        self, folder: Path, name: str, keys: RelayKeys, parents: Sequence[str] = (), **settings: object
    ) -> None:
        self.name = name
        self.store = folder / name
        self.log = folder / f"{name}.log"
        self.endpoint = ""
        self._identity = (name, self.store, self.log, keys.public, keys.secret, tuple(parents), settings)
        self._process: ForkServerProcess | None = None
        self._commands: Connection | None = None

    def start(self) -> str:
        """Returns the endpoint once the node listens."""
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        here, there = context.Pipe()
        port = int(self.endpoint.rpartition(":")[2] or 0)
        self._process = context.Process(target=_serve, args=(there, port, *self._identity), daemon=True)
        self._process.start()
        there.close()
        assert here.poll(START_S), f"{self.name} did not start: {self.last_words}"
        self.endpoint, self._commands = here.recv(), here
        return self.endpoint

    @property
    def process(self) -> ForkServerProcess:
        """Of the last start."""
        assert self._process is not None, f"{self.name} was never started"
        return self._process

    @property
    def alive(self) -> bool:
        """Whether it runs, or is stopped."""
        return self.process.is_alive()

    @property
    def rss_bytes(self) -> int:
        """Its memory."""
        return psutil.Process(self.process.pid).memory_info().rss

    @property
    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.join(START_S)

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP or SIGCONT."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def misbehave(self, mischief: Mischief) -> None:
        """From now on; without any it behaves again."""
        assert self._commands is not None
        self._commands.send(mischief)


def _misbehaving(
    send: Callable[[Listener, bytes, Downward], bool], commands: Connection
) -> Callable[[Listener, bytes, Downward], bool]:
    """`Listener.send` of a node that takes commands. Without a commander the process ends."""
    mischief = Mischief()

    def take() -> None:
        nonlocal mischief
        try:
            mischief = commands.recv()
        except EOFError:
            os._exit(1)

    def sending(listener: Listener, to: bytes, message: Downward) -> bool:
        nonlocal mischief
        if mischief.losses:
            mischief = msgspec.structs.replace(mischief, losses=mischief.losses - 1)
            if mischief.losses % 2:
                return True
        if isinstance(message, Chunk):
            time.sleep(mischief.delay_s)
            if mischief.flips:
                mischief = msgspec.structs.replace(mischief, flips=mischief.flips - 1)
                first = message.data[0] if message.data else 0
                damaged = bytes([first ^ 1]) + bytes(message.data[1:])
                message = msgspec.structs.replace(message, data=memoryview(damaged))
        return send(listener, to, message)

    asyncio.get_running_loop().add_reader(commands.fileno(), take)
    return sending


def _serve(
    commands: Connection,
    port: int,
    name: str,
    store: Path,
    words: Path,
    public: str,
    secret: str,
    parents: Sequence[str],
    settings: dict[str, object],
) -> None:
    os.dup2(os.open(words, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    logging.basicConfig(level=logging.ERROR)  # fuzzed frames make a warning each

    async def relay() -> None:
        node = RelayNode(
            name,
            store=store,
            keys=RelayKeys(public, secret),
            parents=parents,
            port=port,
            emit=lambda event: log.error("%s", event),
            **settings,
        )
        await node.start()
        Listener.send = _misbehaving(Listener.send, commands)
        commands.send(node.endpoint)
        await node.run()

    asyncio.run(relay())
