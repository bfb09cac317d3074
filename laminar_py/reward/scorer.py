"""A scorer: responses in, scores out, many at a time. Runs in a process of the scoring stage.

It has the terms of a reward called: functions in processes of their own (`calls.pool`), since they may hang or die
and are to see none of the run's secrets; what is served by the scorer itself, here. Invariant (law 6): every
response that was submitted gets one score; a mistake of ours is raised by `take`. Terms that look ahead work on
responses that still generate, where little else is asked; no score depends on it. A score that names a column is
told only once that lies in a segment.
"""

import asyncio
import logging
import os
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import msgspec
import numpy as np
from blake3 import blake3

from laminar_py.config.cluster import SandboxConfig
from laminar_py.config.reward import (
    REWARDS,
    ForesightedReward,
    RewardConfig,
    ServeContext,
    ServedReward,
    TermConfig,
)
from laminar_py.config.section import ConfigError
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.writer import SegmentWriter
from laminar_py.records.codec import IntArray
from laminar_py.records.columns import TOKEN_REWARDS, Array, Column, ColumnError, Source, TokenValues, token_values
from laminar_py.records.credit import RoleCredit, earned_by
from laminar_py.records.pieces import ColumnPiece, ColumnRef, PayloadLostError
from laminar_py.records.scoring import (
    NoValueError,
    PartialResponse,
    PoolAddresses,
    Score,
    ScoringRequest,
    ServerAddress,
    TermValue,
    TryAgainError,
    Unfinished,
    Unscored,
)
from laminar_py.records.trajectory import DropReason
from laminar_py.reward.calls.child import CALLS_AT_ONCE
from laminar_py.reward.calls.pool import CallPool, CallSpec
from laminar_py.reward.outcome import LARGEST, Outcome, checked, one_line, plain
from laminar_py.reward.terms import EnvironmentTerm


class LaunchedServers:
    """Addresses as they were last told."""

    def __init__(self) -> None:
        self._newest = PoolAddresses(0, {})
        self._news = asyncio.Event()

    def update(self, addresses: PoolAddresses) -> None:
        """Take these, unless newer ones are known."""
        if addresses.number > self._newest.number:
            self._newest = addresses
            self._news.set()
            self._news = asyncio.Event()

    async def of(self, pool: str) -> Sequence[ServerAddress]:
        """Servers of a pool that are up, once any is."""
        while not (found := self._newest.pools.get(pool)):
            await self._news.wait()
        return found


class ScoredPayload:
    """Reader of responses and writer of columns."""

    def __init__(self, reader: PayloadReader, writer: SegmentWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def complete(self, unscored: Unscored) -> ScoringRequest:
        """The request with its tokens. Raises `PayloadLostError`."""
        return await asyncio.to_thread(self._complete, unscored)

    async def begun(self, unfinished: Unfinished) -> PartialResponse:
        """The beginning of a response with its tokens. Raises `PayloadLostError`."""
        return await asyncio.to_thread(self._begun, unfinished)

    def store(self, trajectory_id: str, columns: Mapping[str, TokenValues]) -> dict[str, ColumnRef]:
        """Write columns; where each lies. Raises `OSError`."""
        pieces = [
            ColumnPiece(trajectory_id=trajectory_id, name=name, values=values) for name, values in columns.items()
        ]
        refs = zip(pieces, self._writer.write_all(pieces), strict=True)
        return {piece.name: ColumnRef(piece.values.dtype, at) for piece, at in refs}

    def _complete(self, unscored: Unscored) -> ScoringRequest:
        response = self._reader.load((one.at for one in unscored.tokens), stores=unscored.stores).response(
            unscored.tokens
        )
        if len(response.ids) != unscored.tokens[-1].end:
            raise PayloadLostError(f"{len(response.ids)} of its {unscored.tokens[-1].end} tokens")
        return msgspec.structs.replace(
            unscored.request,
            response_ids=response.ids,
            logprobs=response.logprobs,
            environment_reward=response.reward,
            roles=response.roles,
        )

    def _begun(self, unfinished: Unfinished) -> PartialResponse:
        loaded = self._reader.load((one.at for one in unfinished.tokens), stores=unfinished.stores)
        return msgspec.structs.replace(unfinished.response, response_ids=loaded.response(unfinished.tokens).ids)


def add_up(
    trajectory_id: str,
    outcomes: Sequence[tuple[TermConfig, Outcome]],
    *,
    columns: Sequence[Column],
    roles: Sequence[RoleCredit] = (),
    length: int,
    at_once: float,
) -> tuple[Score, dict[str, TokenValues]]:
    """Score of a response of `length` tokens, from a scorer that works on `at_once` like it at the same time.

    With it columns [L] that its terms gave. The first term without a value leaves it without one.

    Where a term has a number for each token the sum has too, and those with one number are added at the last.
    `columns` are wanted of any of the terms; `roles` have rewards of the environment.
    """

    def score(value: float | None, **fields: Any) -> Score:
        elapsed_s = sum(outcome.elapsed_s for _, outcome in outcomes)
        return Score(trajectory_id=trajectory_id, value=value, elapsed_s=elapsed_s, at_once=at_once, **fields)

    def failed(reason: DropReason, detail: str) -> tuple[Score, dict[str, TokenValues]]:
        return score(None, failure=reason, detail=detail), {}

    for term, outcome in outcomes:
        if outcome.failure is not None:
            name = f"{term.title}: " if len(outcomes) > 1 else ""
            return failed(outcome.failure, f"{name}{outcome.detail}")
    twice = _column_given_twice(outcomes)
    if twice is not None:
        detail = f"two terms gave the column {twice!r}; leave it to one of them"
        return failed(DropReason.REWARD_FAILED, detail)
    given = {name: values for _, outcome in outcomes for name, values in outcome.columns.items()}
    missing = [c.name for c in columns if c.source is Source.SCORER and c.name not in given]
    if missing:
        detail = f"the reward function gave no column {missing[0]!r}, which the algorithm needs"
        return failed(DropReason.REWARD_FAILED, detail)
    tokens = _token_rewards(outcomes, length) if TOKEN_REWARDS in given else None
    if tokens is not None:
        given[TOKEN_REWARDS] = token_values(tokens)
    value = float(tokens.sum()) if tokens is not None else sum(term.weight * _value(of) for term, of in outcomes)
    if tokens is not None and roles:
        detail = "roles have rewards of their own, and a term gave one for each token; leave that out"
        return failed(DropReason.REWARD_FAILED, detail)
    if not abs(value) <= LARGEST:
        detail = f"its terms add up to {value:g}; keep the sum below {LARGEST:g}"
        return failed(DropReason.REWARD_FAILED, detail)
    return score(value, terms=_term_values(outcomes), roles=_with_terms(roles, outcomes)), given


def _with_terms(
    roles: Sequence[RoleCredit], outcomes: Sequence[tuple[TermConfig, Outcome]]
) -> tuple[RoleCredit, ...]:
    """Credit of roles where the environment's reward is a term: what the others gave is added to each."""
    weights = [term.weight for term, _ in outcomes if isinstance(term, EnvironmentTerm)]
    rest = sum(term.weight * _value(of) for term, of in outcomes if not isinstance(term, EnvironmentTerm))
    if not weights:
        return ()
    return tuple(msgspec.structs.replace(role, reward=sum(weights) * role.reward + rest) for role in roles)


def _column_given_twice(outcomes: Sequence[tuple[TermConfig, Outcome]]) -> str | None:
    """A column other than the token rewards, which add up, that two terms gave."""
    names = Counter(name for _, outcome in outcomes for name in outcome.columns if name != TOKEN_REWARDS)
    return next((name for name, times in names.items() if times > 1), None)


def _token_rewards(outcomes: Sequence[tuple[TermConfig, Outcome]], length: int) -> Array:
    total = np.zeros(length, np.float32)
    with np.errstate(over="ignore"):
        for term, outcome in outcomes:
            values = outcome.columns.get(TOKEN_REWARDS)
            if values is not None:
                total += np.float32(term.weight) * values.array
            else:
                total[-1] += np.float32(term.weight * _value(outcome))
    return total


def _value(outcome: Outcome) -> float:
    assert outcome.value is not None, "a term without a value has a failure"
    return outcome.value


def _term_values(outcomes: Sequence[tuple[TermConfig, Outcome]]) -> list[TermValue]:
    """Record of the terms: the value of each, or the numbers that its function named, with the term where two
    have the same name."""
    named = [(term, outcome, outcome.named or {term.title: _value(outcome)}) for term, outcome in outcomes]
    times = Counter(name for _, _, values in named for name in values)
    return [
        TermValue(
            name=name if times[name] == 1 else f"{term.title}.{name}",
            value=value,
            elapsed_s=outcome.elapsed_s,
            text=outcome.text,
            said=outcome.said,
        )
        for term, outcome, values in named
        for name, value in values.items()
    ]


RETRY_S = 120.0  # a call is made again that long where it may succeed another time
PAUSE_S = 0.5  # before the second, twice as long before each further one
LONGEST_PAUSE_S = 8.0
OWN_LIMITS_S = 1.0  # by which limits that a served call keeps itself come first
CACHED = 4096  # outcomes of a term
AHEAD_AT_ONCE = 8  # unfinished responses that are worked on: few, so that finished ones hardly wait for them
Call: TypeAlias = Callable[[ScoringRequest], Awaitable[Outcome]]
log = logging.getLogger(__name__)


class Scorer:
    """Scores by the terms of `reward`; `columns` are wanted of them, `decode` makes the text of ids.
    Functions may not write below `record`. Terms that ask launched servers wait for them in `launched`. Tokens are
    read and columns stored in `payload`; without one requests have their tokens, and nobody asks for columns.

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
        launched: LaunchedServers | None = None,
        payload: ScoredPayload | None = None,
    ) -> None:
        self._payload = payload
        self._reward = reward
        self._columns = columns
        self._decode = decode
        self._context = ServeContext(
            timeout_s=reward.timeout_s,
            folder=folder,
            env=_environment(reward.env, name=name),
            sandbox=sandbox,
            decode=decode,
            addresses=(launched or LaunchedServers()).of,
        )
        self._name = name
        self._record = record
        self._calls: dict[str, Call] = {}  # by the term's settings, which several tasks may share
        self._room: dict[str, int] = {}  # calls at the same time, likewise
        self._foresighted: dict[str, ForesightedReward] = {}  # as well
        self._ahead: dict[str, asyncio.Task[None]] = {}  # by trajectory
        self._stack = AsyncExitStack()
        self._running = set[asyncio.Task[None]]()
        self._done: list[Score] = []
        self._news = asyncio.Event()

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
        under_way = [*self._running, *self._ahead.values()]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self._stack.aclose()

    @property
    def at_once(self) -> int:
        """Responses that it works on at the same time: as many as the widest term, others wait for theirs."""
        return min(CALLS_AT_ONCE, max(self._room.values()))

    def submit(self, responses: Sequence[Unscored]) -> None:
        """Begin with these responses."""
        for unscored in responses:
            name = unscored.request.trajectory_id
            if (ahead := self._ahead.pop(name, None)) is not None:
                ahead.cancel()
            self._running.add(asyncio.create_task(self._score(unscored), name=f"score-{name}"))

    def look_ahead(self, responses: Sequence[Unfinished]) -> None:
        """Work on what these have so far, of as many as there is room for. Raises what such a call raised."""
        for name in [name for name, task in self._ahead.items() if task.done()]:
            self._ahead.pop(name).result()
        for unfinished in responses:
            name = unfinished.response.trajectory_id
            if len(self._ahead) < AHEAD_AT_ONCE and name not in self._ahead:
                self._ahead[name] = asyncio.create_task(self._look_ahead(unfinished), name=f"look-ahead-{name}")

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
        kind, limit_s = REWARDS.get(term.kind), term.timeout_s or self._reward.timeout_s
        if kind.serve is not None:
            with REWARDS.naming_package(term.kind):
                context = replace(self._context, timeout_s=limit_s)
                function = await stack.enter_async_context(kind.serve(term, context))
            self._room[key] = function.at_once
            if term.looks_ahead:
                assert isinstance(function, ForesightedReward), f"{term.kind}: has no look_ahead"
                self._foresighted[key] = function
            return _served(function, term, limit_s=limit_s)
        spec = CallSpec(
            term=key,
            timeout_s=limit_s,
            folder=self._context.folder,
            columns=[column for column in self._columns if term.gives_columns],
            env=self._context.env,
            record=self._record,
        )
        pool = CallPool(spec, name=f"{self._name}.{len(self._calls)}", processes=term.processes)
        await stack.enter_async_context(pool)
        self._room[key] = pool.at_once
        return pool.call

    async def _look_ahead(self, unfinished: Unfinished) -> None:
        assert self._payload is not None, "whoever shows beginnings of responses stores them"
        try:
            response = await self._payload.begun(unfinished)
        except PayloadLostError as error:
            log.info("%s: not ahead of its end: %s", unfinished.response.trajectory_id, error)
            return
        await self._work_ahead(response)

    async def _work_ahead(self, response: PartialResponse) -> None:
        for term in self._reward.of_task(response.task, set_name=response.set_name):
            function = self._foresighted.get(term.model_dump_json())
            if function is None:
                continue
            with REWARDS.naming_package(term.kind):
                try:
                    await function.look_ahead(response)
                except (NoValueError, TryAgainError) as error:
                    log.info("%s: not ahead of its end: %s", response.trajectory_id, error)

    async def _score(self, unscored: Unscored) -> None:
        try:
            score = await self._score_of(await self._complete(unscored))
            self._done.append(score)
        except PayloadLostError as error:
            lost = DropReason.HOST_LOST
            name = unscored.request.trajectory_id
            self._done.append(Score(trajectory_id=name, value=None, failure=lost, detail=str(error)))
        finally:
            self._news.set()

    async def _complete(self, unscored: Unscored) -> ScoringRequest:
        """The request with tokens and text. Raises `PayloadLostError`."""
        request = unscored.request
        if unscored.tokens:
            assert self._payload is not None, f"{request.trajectory_id} is given by reference"
            request = await self._payload.complete(unscored)
        return msgspec.structs.replace(request, response=self._decode(request.response_ids))

    async def _score_of(self, request: ScoringRequest) -> Score:
        outcomes = await self._outcomes(request)
        score, columns = add_up(
            request.trajectory_id,
            outcomes,
            columns=() if request.set_name else self._columns,  # an evaluation trains nobody
            roles=request.roles,
            length=len(request.response_ids),
            at_once=self._width(outcomes),
        )
        if not columns or self._payload is None:
            return score
        stored = self._payload.store(request.trajectory_id, columns)
        return msgspec.structs.replace(score, columns=stored, earned=earned_by(columns))

    async def _outcomes(self, request: ScoringRequest) -> list[tuple[TermConfig, Outcome]]:
        """Outcomes of the terms, asked at the same time but for those that wait for what another says."""
        terms = self._reward.of_task(request.task, set_name=request.set_name)
        first = [term for term in terms if not term.asked_unless]
        outcomes = await asyncio.gather(*(self._call(term, request) for term in first))
        said = {term.title: outcome for term, outcome in zip(first, outcomes, strict=True)}
        for term in terms:
            of = said.get(term.asked_unless or "")
            if of is not None and of.failure is None and (of.value or 0) <= 0:
                said[term.title] = await self._call(term, request)
        return [(term, said[term.title]) for term in terms if term.title in said]

    async def _call(self, term: TermConfig, request: ScoringRequest) -> Outcome:
        return await _persistently(self._calls[term.model_dump_json()], request)

    def _width(self, outcomes: Sequence[tuple[TermConfig, Outcome]]) -> float:
        """Responses at the same time that took what this one did: bounded by the term with the longest queue."""
        busiest = max(of.elapsed_s / self._room[term.model_dump_json()] for term, of in outcomes)
        return sum(of.elapsed_s for _, of in outcomes) / busiest if busiest else float(self.at_once)


async def _persistently(call: Call, request: ScoringRequest) -> Outcome:
    """Outcome of a call that is made again while another may succeed."""
    until, pause_s = time.monotonic() + RETRY_S, PAUSE_S
    while True:
        outcome = await call(request)
        if not outcome.transient or time.monotonic() > until:
            return outcome
        log.info("%s: is asked again: %s", request.trajectory_id, outcome.detail)
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))  # so that not all come back at the same moment
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _environment(names: Sequence[str], *, name: str) -> Mapping[str, str]:
    """Variables that terms see. Raises `ConfigError` for one that is not set where the scorer runs."""
    missing = next((each for each in names if each not in os.environ), None)
    if missing is not None:
        raise ConfigError(f"reward.env={missing}: not set where {name} runs; export it there, or leave it out")
    return {each: os.environ[each] for each in names}


def _served(function: ServedReward, term: TermConfig, *, limit_s: float) -> Call:
    """Calls of what the scorer serves itself; a mistake in there is one of ours, or of the package's."""

    room = asyncio.Semaphore(function.at_once)

    async def call(request: ScoringRequest) -> Outcome:
        async with room:
            return await limited(request)

    async def limited(request: ScoringRequest) -> Outcome:
        start = time.perf_counter()
        with REWARDS.naming_package(term.kind):
            try:
                async with asyncio.timeout(limit_s + OWN_LIMITS_S):
                    returned = await function(request)
                outcome = checked(plain(returned), (), length=len(request.response_ids))
            except TimeoutError:
                detail = f"no value within {limit_s:g} s, by reward.timeout_s or its own limit"
                outcome = Outcome(failure=DropReason.REWARD_TIMEOUT, detail=detail)
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
        same = (
            request.prompt,
            request.response,
            request.answer,
            request.task,
            request.fields_json,
            str(request.finish_reason),
        )
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
