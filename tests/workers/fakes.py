"""An incarnation of which a test gives what it looks at, and processes that are objects of the test's own."""

import asyncio
import inspect
from dataclasses import fields

from laminar_py.cluster.errors import PartDiedError
from laminar_py.cluster.part import Part
from laminar_py.workers import keeper as keeper_module
from laminar_py.workers.incarnation import Incarnation
from laminar_py.workers.supervisor import Supervisor


def make_incarnation(**given):
    """What is not given is not there."""
    absent = dict.fromkeys((field.name for field in fields(Incarnation)), None)
    supervisor = Supervisor(record=lambda event: None, max_restarts=9)
    own = {"supervisor": supervisor, "number": 1, "kernel_kills": NoKills()}
    return Incarnation(**(absent | own | given))


class NoKills:
    """Stands for `cluster.memory.KernelKills` where the kernel ends nothing."""

    async def meet(self, part):
        pass

    async def explain(self, death, node):
        return death


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
        await asyncio.wait([self._death, answer], return_when=asyncio.FIRST_COMPLETED)
        if self._death.done():
            answer.cancel()
            raise PartDiedError(self.name, self._death.result())
        return answer.result()

    async def _answer(self, method, arguments):
        answer = getattr(self.actor, method)(*arguments)
        return await answer if inspect.isawaitable(answer) else answer

    ask = Part.ask

    def send(self, method, *arguments):
        """Take a call, of any thread."""
        self._loop.call_soon_threadsafe(self.sent.put_nowait, (method, *arguments))

    def die(self, reason="killed"):
        if not self._death.done():
            self._death.set_result(reason)

    kill = die

    @property
    def is_dead(self):
        return self._death.done()
