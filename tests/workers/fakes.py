"""An incarnation of which a test gives what it looks at, and processes that are objects of the test's own."""

import asyncio
import inspect
from dataclasses import fields
from itertools import count
from types import SimpleNamespace

from laminar_py.ledger.segments.salvage import Salvage
from laminar_py.runtime.cluster.calls import as_scalar
from laminar_py.runtime.cluster.errors import PartCrashedError
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.workers import keeper as keeper_module
from laminar_py.runtime.workers.incarnation import Incarnation, Supervisor


def make_incarnation(**given):
    """What is not given is not there."""
    absent = dict.fromkeys((field.name for field in fields(Incarnation)), None)
    supervisor = Supervisor(record=lambda event: None, max_restarts=9)
    own = {"supervisor": supervisor, "number": 1, "inputs": SimpleNamespace(probes=())}
    return Incarnation(**(absent | own | given))


class Segments:
    """Stands for `RunSegments`: `found` is what journals of a dead part have; `discarded` are those that were."""

    def __init__(self):
        self.found, self.running, self.discarded = [], {}, []
        self._starts = count()

    def new_label(self, part):
        return f"{part}-1-{next(self._starts)}"

    async def salvage(self, label, running):
        self.running[label] = running
        return Salvage(self.found, [f"{label}.1.journal"])

    async def discard(self, journals):
        self.discarded += journals


class Processes:
    """Stands for Ray: `make(name)` is the actor of each part that is spawned, `await next()` its process.

    An actor's methods may be coroutines; a call ends at once when its process dies.
    """

    def __init__(self, monkeypatch, make):
        self._make = make
        self._spawned = asyncio.Queue()
        monkeypatch.setattr(keeper_module, "Part", self._spawn)
        monkeypatch.setattr(keeper_module, "RETRY_S", 0.0)

    def _spawn(self, name, kind, *, concurrency, timeout_s, place):
        process = Process(name, place, self._make(name))
        self._spawned.put_nowait(process)
        return process

    async def next(self):
        return await self._spawned.get()

    @property
    def none_left(self):
        return self._spawned.empty()


class Process:
    """Stands for `cluster.part.Part`."""

    def __init__(self, name, place, actor):
        self.name, self.place, self.actor = name, place, actor
        self.sent = asyncio.Queue()  # names and arguments of calls that nobody waits for
        self._loop = asyncio.get_running_loop()
        self._death = self._loop.create_future()

    async def call(self, method, *arguments, timeout_s=None):
        answer = asyncio.ensure_future(self._answer(method, arguments))
        try:
            await asyncio.wait([self._death, answer], return_when=asyncio.FIRST_COMPLETED)
        finally:
            answer.cancel()
        if self._death.done():
            raise PartCrashedError(self.name, self._death.result())
        return answer.result()

    async def _answer(self, method, arguments):
        answer = getattr(self.actor, method)(*map(as_scalar, arguments))
        return as_scalar(await answer if inspect.isawaitable(answer) else answer)

    call_for = Part.call_for

    def send(self, method, *arguments):
        """Take a call, of any thread."""
        self._loop.call_soon_threadsafe(self.sent.put_nowait, (method, *map(as_scalar, arguments)))

    def die(self, reason="killed"):
        if not self._death.done():
            self._death.set_result(reason)

    kill = die

    @property
    def is_dead(self):
        return self._death.done()
