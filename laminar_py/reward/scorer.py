"""A scorer: responses in, scores out, many at a time. Runs in a process of the scoring stage.

It has the terms of a reward called: functions in processes of their own (`calls.pool`), since they may hang or die
and are to see none of the run's secrets; what is served by the scorer itself, here. Invariant (law 6): every
response that was submitted gets one score; a mistake of ours is raised by `take`.
"""

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

import msgspec
from blake3 import blake3

from laminar_py.config.reward import REWARDS, RewardConfig, ServeContext, ServedReward, TermConfig
from laminar_py.config.sandbox import SandboxConfig
from laminar_py.records.codec import IntArray
from laminar_py.records.columns import Column, ColumnError
from laminar_py.records.scoring import NoValueError, Score, ScoringRequest, TryAgainError
from laminar_py.records.trajectory import DropReason
from laminar_py.reward.calls.limited import CALLS_AT_ONCE
from laminar_py.reward.calls.pool import CallPool
from laminar_py.reward.outcome import Outcome, checked, one_line, plain
from laminar_py.reward.sums import add_up

ATTEMPTS = 5  # of a call that may succeed another time
PAUSE_S = 0.5  # before the second, twice as long before each further one
CACHED = 4096  # outcomes of a term
Call: TypeAlias = Callable[[ScoringRequest], Awaitable[Outcome]]


class Scorer:
    """Scores by the terms of `reward`; `columns` are wanted of them, `decode` makes the text of ids.
    Functions may not write below `record`.

    `async with` starts and ends what the terms need. Raises `ConfigError` where a term cannot be had.
    """

    def __init__(
        self,
        reward: RewardConfig,
        *,
        sandbox: SandboxConfig,
        columns: Sequence[Column],
        decode: Callable[[IntArray], str],
        folder: Path,
        name: str,
        record: Path | None = None,
    ) -> None:
        self._reward = reward
        self._columns = columns
        self._decode = decode
        env = {name: os.environ[name] for name in reward.env if name in os.environ}
        self._context = ServeContext(
            timeout_s=reward.timeout_s, folder=folder, env=env, sandbox=sandbox, decode=decode
        )
        self._name = name
        self._record = record
        self._calls: dict[str, Call] = {}  # by the term's settings, which several tasks may share
        self._stack = AsyncExitStack()
        self._running = set[asyncio.Task[None]]()
        self._done: list[Score] = []
        self._news = asyncio.Event()
        self.at_once = CALLS_AT_ONCE
        """Responses that it works on at the same time."""

    async def __aenter__(self) -> "Scorer":
        async with AsyncExitStack() as stack:
            for term in self._reward.terms:
                if (key := term.model_dump_json()) not in self._calls:
                    call = await self._open(stack, term, key)
                    self._calls[key] = _cached(call) if REWARDS.get(term.kind).caches else call
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._stack.aclose()

    def submit(self, requests: Sequence[ScoringRequest]) -> None:
        """Begin with these responses."""
        for request in requests:
            task = asyncio.create_task(self._score(request), name=f"score-{request.trajectory_id}")
            self._running.add(task)

    async def take(self, wait_s: float) -> list[Score]:
        """Scores, as soon as there is one; none after `wait_s` seconds. Raises what a call raised."""
        try:
            async with asyncio.timeout(wait_s):
                await self._news.wait()
        except TimeoutError:
            return []
        self._news.clear()
        for task in [task for task in self._running if task.done()]:
            self._running.discard(task)
            task.result()
        scores, self._done = self._done, []
        return scores

    async def _open(self, stack: AsyncExitStack, term: TermConfig, key: str) -> Call:
        kind = REWARDS.get(term.kind)
        if kind.serve is not None:
            with REWARDS.blaming(term.kind):
                function = await stack.enter_async_context(kind.serve(term, self._context))
            self.at_once = min(self.at_once, function.at_once)
            return _served(function, term)
        pool = CallPool(
            key,
            name=f"{self._name}.{len(self._calls)}",
            timeout_s=self._reward.timeout_s,
            folder=self._context.folder,
            columns=[column for column in self._columns if term.gives_columns],
            processes=term.processes,
            env=self._context.env,
            record=self._record,
        )
        await stack.enter_async_context(pool)
        self.at_once = min(self.at_once, pool.at_once)
        return pool.call

    async def _score(self, request: ScoringRequest) -> None:
        try:
            request = msgspec.structs.replace(request, response=self._decode(request.response_ids))
            outcomes: list[tuple[TermConfig, Outcome]] = []
            for term in self._reward.of_task(request.task):
                if any(other.title == term.asked_unless and (of.value or 0) > 0 for other, of in outcomes):
                    continue
                outcome = await _persistently(self._calls[term.model_dump_json()], request)
                outcomes.append((term, outcome))
                if outcome.failure is not None:
                    break
            score = add_up(
                request.trajectory_id,
                outcomes,
                columns=self._columns,
                length=len(request.response_ids),
                at_once=self.at_once,
            )
            self._done.append(score)
        finally:
            self._news.set()


async def _persistently(call: Call, request: ScoringRequest) -> Outcome:
    """Outcome of a call that is made again while another may succeed."""
    for attempt in range(1, ATTEMPTS):
        outcome = await call(request)
        if not outcome.transient:
            return outcome
        await asyncio.sleep(PAUSE_S * 2 ** (attempt - 1))
    return await call(request)


def _served(function: ServedReward, term: TermConfig) -> Call:
    """Calls of what the scorer serves itself; a mistake in there is one of ours, or of the package's."""

    room = asyncio.Semaphore(function.at_once)

    async def call(request: ScoringRequest) -> Outcome:
        async with room:
            return await limited(request)

    async def limited(request: ScoringRequest) -> Outcome:
        start = time.perf_counter()
        with REWARDS.blaming(term.kind):
            try:
                outcome = checked(plain(await function(request)), (), length=len(request.response_ids))
            except (NoValueError, TryAgainError, ColumnError) as error:
                reason = error.reason if isinstance(error, NoValueError) else DropReason.REWARD_FAILED
                transient = isinstance(error, TryAgainError)
                outcome = Outcome(failure=reason, detail=one_line(str(error)), transient=transient)
        return msgspec.structs.replace(outcome, elapsed_s=time.perf_counter() - start)

    return call


def _cached(call: Call) -> Call:
    """Calls of which equal ones are made once, also at the same time."""
    known: OrderedDict[bytes, asyncio.Future[Outcome]] = OrderedDict()

    async def cached(request: ScoringRequest) -> Outcome:
        same = (request.response, request.answer, request.task, request.fields_json, str(request.finish_reason))
        key = blake3(msgspec.msgpack.encode(same)).digest(length=16)
        hit = key in known
        if not hit:
            known[key] = asyncio.ensure_future(call(request))
            if len(known) > CACHED:
                known.popitem(last=False)
        known.move_to_end(key)
        outcome = await asyncio.shield(known[key])
        if outcome.failure is not None:
            known.pop(key, None)
        return msgspec.structs.replace(outcome, elapsed_s=0.0) if hit else outcome

    return cached
