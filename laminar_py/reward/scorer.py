"""A scorer: responses in, scores out, many at a time. It runs in a process of the scoring stage.

It calls the terms of a reward. Functions run in processes of their own (`calls.pool`), because they may hang or
crash and must not see the run's secrets. Served terms run in the scorer itself. Every submitted response gets one
score (law 6); `next_scores` raises our own mistakes. The scorer writes a column into a segment before it returns
the score that names the column.
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
from functools import partial
from pathlib import Path
from typing import TypeAlias
from zlib import crc32

import msgspec
import numpy as np
from blake3 import blake3

from laminar_py.config.cluster import SandboxConfig
from laminar_py.config.reward import REWARDS, RewardConfig, ServeContext, ServedReward, TermConfig
from laminar_py.config.section import ConfigError
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.writer import SegmentWriter
from laminar_py.records.codec import DIGEST_BYTES, IntArray
from laminar_py.records.columns import TOKEN_REWARDS, Array, Column, ColumnError, Source, TokenValues, token_values
from laminar_py.records.credit import RoleCredit, earned_by
from laminar_py.records.patience import Patience
from laminar_py.records.pieces import ColumnPiece, ColumnRef, PayloadLostError
from laminar_py.records.scoring import (
    NoValueError,
    PoolAddresses,
    Score,
    ScoringRequest,
    ServerAddress,
    TermValue,
    TryAgainError,
    Unscored,
)
from laminar_py.records.trajectory import DropReason
from laminar_py.reward.calls.child import CALLS_AT_ONCE, CallSpec, WriteFence
from laminar_py.reward.calls.pool import CallPool
from laminar_py.reward.outcome import LARGEST, Outcome, check_reward, failed, late, read_reward
from laminar_py.reward.terms import EnvironmentTerm


class LaunchedServers:
    """Addresses of the reward servers that the run launches; the controller sends updates."""

    def __init__(self) -> None:
        self._newest = PoolAddresses(0, {})
        self._news = asyncio.Event()

    def update(self, addresses: PoolAddresses) -> None:
        """Store these addresses, unless newer ones have arrived before."""
        if addresses.number > self._newest.number:
            self._newest = addresses
            self._news.set()
            self._news = asyncio.Event()

    async def wait_for_servers(self, pool: str) -> Sequence[ServerAddress]:
        """Wait until a server of the pool is up, and return the addresses of its running servers."""
        while not (found := self._newest.pools.get(pool)):
            await self._news.wait()
        return found


class ScorerStorage:
    """Reads tokens of responses from segments, and writes columns into segments."""

    def __init__(self, reader: PayloadReader, writer: SegmentWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def store(self, trajectory_id: str, columns: Mapping[str, TokenValues]) -> dict[str, ColumnRef]:
        """Write columns of a response, and return the place of each by name. Raises `OSError`."""
        pieces = [
            ColumnPiece(trajectory_id=trajectory_id, name=name, values=values) for name, values in columns.items()
        ]
        refs = zip(pieces, self._writer.write_all(pieces), strict=True)
        await self._writer.synced()
        return {piece.name: ColumnRef(piece.values.dtype, at) for piece, at in refs}

    def load_request(self, unscored: Unscored) -> ScoringRequest:
        """Read the tokens of a response from disk, and return its request with them. Raises `PayloadLostError`."""
        response = self._reader.load(tokens.at for tokens in unscored.tokens).response(unscored.tokens)
        if len(response.ids) != unscored.tokens[-1].end:
            raise PayloadLostError(f"only {len(response.ids)} of its {unscored.tokens[-1].end} tokens are stored")
        return msgspec.structs.replace(
            unscored.request,
            response_ids=response.ids,
            logprobs=response.logprobs,
            environment_reward=response.reward,
            roles=response.roles,
        )


def add_up(
    trajectory_id: str,
    outcomes: Sequence[tuple[TermConfig, Outcome]],
    *,
    columns: Sequence[Column],
    roles: Sequence[RoleCredit] = (),
    length: int,
    concurrency: float,
) -> tuple[Score, dict[str, TokenValues]]:
    """Add up the outcomes of all terms for a response of `length` tokens.

    Returns the score, and the columns [L] that the terms gave. The score has no value if a term has none. If a
    term gives a number for each token, the result has one for each, and other terms count at the last token.
    `columns` names the columns that the algorithm needs. `roles` have the environment's rewards. `concurrency` is
    the number of responses that the scorer worked on at the same time.
    """

    elapsed_s = sum(outcome.elapsed_s for _, outcome in outcomes)
    score = partial(Score, trajectory_id=trajectory_id, elapsed_s=elapsed_s, at_once=concurrency)
    for term, outcome in outcomes:
        if outcome.failure is not None:
            name = f"{term.title}: " if len(outcomes) > 1 else ""
            return score(value=None, failure=outcome.failure, detail=f"{name}{outcome.detail}"), {}
    given = {name: values for _, outcome in outcomes for name, values in outcome.columns.items()}
    missing = [c.name for c in columns if c.source is Source.SCORER and c.name not in given]
    tokens = _token_rewards(outcomes, length) if TOKEN_REWARDS in given else None
    value = sum(term.weight * _value(outcome) for term, outcome in outcomes)
    if tokens is not None:
        given[TOKEN_REWARDS] = token_values(tokens)
        value = float(tokens.sum())
    if (twice := _column_given_twice(outcomes)) is not None:
        detail = f"two terms gave the column {twice!r}; leave it to one of them"
    elif missing:
        detail = f"the reward function gave no column {missing[0]!r}, which the algorithm needs"
    elif tokens is not None and roles:
        detail = "a term gave a reward for each token, but roles have their own rewards; leave that term out"
    elif not abs(value) <= LARGEST:
        detail = f"its terms add up to {value:g}; keep the sum below {LARGEST:g}"
    else:
        return score(value=value, terms=_term_values(outcomes), roles=_with_terms(roles, outcomes)), given
    return score(value=None, failure=DropReason.REWARD_FAILED, detail=detail), {}


def _with_terms(
    roles: Sequence[RoleCredit], outcomes: Sequence[tuple[TermConfig, Outcome]]
) -> tuple[RoleCredit, ...]:
    """Weight each role's reward by `environment`, and add the other terms. Returns () without that term."""
    weights = [term.weight for term, _ in outcomes if isinstance(term, EnvironmentTerm)]
    others = [outcome for outcome in outcomes if not isinstance(outcome[0], EnvironmentTerm)]
    rest = sum(term.weight * _value(outcome) for term, outcome in others)
    if not weights:
        return ()
    return tuple(msgspec.structs.replace(role, reward=sum(weights) * role.reward + rest) for role in roles)


def _column_given_twice(outcomes: Sequence[tuple[TermConfig, Outcome]]) -> str | None:
    """Return a column that two terms gave, or None. Token rewards do not count, since they add up."""
    names = Counter(name for _, outcome in outcomes for name in outcome.columns if name != TOKEN_REWARDS)
    return next((name for name, times in names.items() if times > 1), None)


def _token_rewards(outcomes: Sequence[tuple[TermConfig, Outcome]], length: int) -> Array:
    """Add up rewards per token [L] by weight; a term with one value gives it to the last token."""
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
    """List the value of each term, or the named numbers of its function. Equal names get the term as a prefix."""
    named = [(term, outcome, outcome.named or {term.title: _value(outcome)}) for term, outcome in outcomes]
    times = Counter(name for _, _, values in named for name in values)
    return [
        TermValue(
            name=name if times[name] == 1 else f"{term.title}.{name}",
            value=value,
            elapsed_s=outcome.elapsed_s,
            text=outcome.text,
            answer=outcome.answer,
        )
        for term, outcome, values in named
        for name, value in values.items()
    ]


RETRY_FOR_S = 120.0  # retries of a call end after so long
PAUSE_S = 0.5  # before the first retry; it doubles before each further one
LONGEST_PAUSE_S = 8.0
OWN_LIMITS_S = 1.0  # margin, so that a served term's own timeout comes first
CACHED = 4096  # outcomes of a term
SAMPLE_CHARS = 400  # last characters of a response, for the live view
Call: TypeAlias = Callable[[ScoringRequest], Awaitable[Outcome]]
log = logging.getLogger(__name__)


class Scorer:
    """Scores responses by the terms of `reward`. `async with` starts and ends their processes and connections.

    `columns` are the columns that the algorithm needs of the terms. `decode` turns token ids into text. Reward
    functions may not write where `fence` says. `launched` has the addresses of servers that the run launches.
    `payload` reads tokens and stores columns; without it requests carry their tokens, and columns are dropped.
    Entering raises `ConfigError` if a term cannot start.
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
        fence: WriteFence | None = None,
        launched: LaunchedServers | None = None,
        payload: ScorerStorage | None = None,
    ) -> None:
        self._payload = payload
        self._reward = reward
        self._columns = columns
        self._decode = decode
        self._context = ServeContext(
            timeout_s=reward.timeout_s,
            folder=folder,
            env=_read_environment(reward.env, name=name),
            sandbox=sandbox,
            decode=decode,
            addresses=(launched or LaunchedServers()).wait_for_servers,
        )
        self._name = name
        self._fence = fence
        self._calls: dict[str, Call] = {}  # by the settings of a term, which several tasks may share
        self._room: dict[str, int] = {}  # most concurrent calls, by the settings of a term
        self._stack = AsyncExitStack()
        self._running = set[asyncio.Task[None]]()
        self._done: list[Score] = []
        self._news = asyncio.Event()  # a response was scored, or its task failed

    async def __aenter__(self) -> "Scorer":
        async with AsyncExitStack() as stack:
            for term in self._reward.terms:
                if (key := term.model_dump_json()) not in self._calls:
                    call = await self._open(stack, term, key)
                    self._calls[key] = _cached_call(call) if REWARDS.get(term.kind).caches else call
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._stack.aclose()

    @property
    def concurrency(self) -> int:
        """Number of responses in work at a time: as many as the term with the most room can take."""
        return min(CALLS_AT_ONCE, max(self._room.values()))

    def submit_responses(self, responses: Sequence[Unscored]) -> None:
        """Start to score these responses. Their scores come from `next_scores`."""
        for unscored in responses:
            self._running.add(asyncio.create_task(self._score(unscored), name=f"score-{unscored.id}"))

    async def next_scores(self, wait_s: float) -> list[Score]:
        """Wait for scores and return all ready ones; [] after `wait_s` seconds. Raises the error of a bug."""
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
        """Start the served function or the worker pool of a term; `stack` ends it. `key`: its settings as JSON.

        Note its room in `_room`, and return the function that calls the term. Raises `ConfigError`.
        """
        kind, limit_s = REWARDS.get(term.kind), term.timeout_s or self._reward.timeout_s
        if kind.serve is not None:
            with REWARDS.naming_package(term.kind):
                start_s = self._reward.servers[term.pool].start_timeout_s if term.pool is not None else 0.0
                context = replace(self._context, timeout_s=limit_s, start_s=start_s)
                function = await stack.enter_async_context(kind.serve(term, context))
            self._room[key] = function.concurrency
            return _served_call(function, term, limit_s=limit_s, start_s=start_s)
        spec = CallSpec(
            term=key,
            timeout_s=limit_s,
            folder=str(self._context.folder),
            columns=[column for column in self._columns if term.gives_columns],
            env=dict(self._context.env),
            fence=self._fence,
        )
        pool = CallPool(spec, name=f"{self._name}.{len(self._calls)}", processes=term.processes)
        await stack.enter_async_context(pool)
        self._room[key] = pool.concurrency
        return pool.call

    async def _score(self, unscored: Unscored) -> None:
        """Score a response and put the score into `_done`; lost tokens become a failed score."""
        try:
            request = await self._load(unscored)
            score = await self._score_request(request)
            if unscored.wants_sample:
                score = msgspec.structs.replace(score, sample=request.response[-SAMPLE_CHARS:])
            self._done.append(score)
        except PayloadLostError as error:
            lost = DropReason.TOKENS_LOST
            name = unscored.request.trajectory_id
            self._done.append(Score(trajectory_id=name, value=None, failure=lost, detail=str(error)))
        finally:
            self._news.set()

    async def _load(self, unscored: Unscored) -> ScoringRequest:
        """Return the request with its tokens and its text. Raises `PayloadLostError`."""
        request = unscored.request
        if unscored.tokens:
            assert self._payload is not None, f"{request.trajectory_id}: this scorer has no reader for its tokens"
            request = await asyncio.to_thread(self._payload.load_request, unscored)
        return msgspec.structs.replace(request, response=self._decode(request.response_ids))

    async def _score_request(self, request: ScoringRequest) -> Score:
        """Call all terms, and add up their outcomes; store the columns of a training response."""
        outcomes = await self._outcomes(request)
        score, columns = add_up(
            request.trajectory_id,
            outcomes,
            columns=() if request.set_name else self._columns,  # an evaluation needs no columns
            roles=request.roles,
            length=len(request.response_ids),
            concurrency=self._concurrency(outcomes),
        )
        score = msgspec.structs.replace(
            score,
            raised=any(outcome.raised for _, outcome in outcomes),
            length=len(request.response_ids),
            response_digest=crc32(request.response_ids.tobytes()),
            response_logprob=float(request.logprobs.sum(dtype=np.float64)),
        )
        if not columns or self._payload is None:
            return score
        stored = await self._payload.store(request.trajectory_id, columns)
        return msgspec.structs.replace(score, columns=stored, earned=earned_by(columns))

    async def _outcomes(self, request: ScoringRequest) -> list[tuple[TermConfig, Outcome]]:
        """Call all terms of a request's task at the same time, and return each term with its outcome.

        A term with `unless` waits for the named term, and is called only if that term gave 0 or less.
        """
        terms = self._reward.of_task(request.task, set_name=request.set_name)
        first = [term for term in terms if not term.asked_unless]
        outcomes = await asyncio.gather(*(self._call(term, request) for term in first))
        by_title = {term.title: outcome for term, outcome in zip(first, outcomes, strict=True)}
        for term in terms:
            earlier = by_title.get(term.asked_unless or "")
            if earlier is not None and earlier.failure is None and (earlier.value or 0) <= 0:
                by_title[term.title] = await self._call(term, request)
        return [(term, by_title[term.title]) for term in terms if term.title in by_title]

    async def _call(self, term: TermConfig, request: ScoringRequest) -> Outcome:
        return await _call_with_retries(self._calls[term.model_dump_json()], request)

    def _concurrency(self, outcomes: Sequence[tuple[TermConfig, Outcome]]) -> float:
        """Return how many responses like this one the scorer can work on at a time, by its busiest term."""
        busiest = max(outcome.elapsed_s / self._room[term.model_dump_json()] for term, outcome in outcomes)
        return sum(outcome.elapsed_s for _, outcome in outcomes) / busiest if busiest else float(self.concurrency)


async def _call_with_retries(call: Call, request: ScoringRequest) -> Outcome:
    """Call a term, and retry for `RETRY_FOR_S` seconds while its outcome is transient."""
    until, pause_s = time.monotonic() + RETRY_FOR_S, PAUSE_S
    while True:
        outcome = await call(request)
        if not outcome.transient or time.monotonic() > until:
            return outcome
        log.info("%s: a term has no value yet and is called again: %s", request.trajectory_id, outcome.detail)
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))  # jitter: not all retries at the same moment
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _read_environment(names: Sequence[str], *, name: str) -> Mapping[str, str]:
    """Read the variables of `reward.env` for the scorer `name`. Raises `ConfigError` if one is not set here."""
    missing = next((variable for variable in names if variable not in os.environ), None)
    if missing is not None:
        raise ConfigError(
            f"reward.env={missing}: not set where {name} runs; export it there, or leave it out of reward.env"
        )
    return {variable: os.environ[variable] for variable in names}


def _served_call(function: ServedReward, term: TermConfig, *, limit_s: float, start_s: float) -> Call:
    """Wrap a served term as a call with a timeout and a bound on concurrency.

    Until the first outcome a call may take `start_s`. The call raises any undeclared error of the function: a bug
    of ours, or of the package that brings the term.
    """

    room = asyncio.Semaphore(function.concurrency)
    patience = Patience(limit_s + OWN_LIMITS_S, first_s=start_s + OWN_LIMITS_S)

    async def call(request: ScoringRequest) -> Outcome:
        """Call the served function within its limits; declared errors and timeouts become failed outcomes."""
        async with room:
            start, raised = time.perf_counter(), True
            with REWARDS.naming_package(term.kind):
                try:
                    async with patience.timer():
                        returned = await function(request)
                    patience.note_answer()
                    outcome = check_reward(read_reward(returned), (), length=len(request.response_ids))
                    raised = False
                except TimeoutError:
                    outcome = late(patience.present_s - OWN_LIMITS_S)
                except NoValueError as error:
                    patience.note_answer()
                    outcome = failed(str(error), error.reason)
                except (TryAgainError, ColumnError) as error:
                    outcome = failed(str(error), transient=isinstance(error, TryAgainError))
            return msgspec.structs.replace(outcome, elapsed_s=time.perf_counter() - start, raised=raised)

    return call


def _cached_call(call: Call) -> Call:
    """Wrap a call so that equal requests, also concurrent ones, are made once. Failures are not cached."""
    known: OrderedDict[bytes, asyncio.Future[Outcome]] = OrderedDict()

    async def cached(request: ScoringRequest) -> Outcome:
        """Return the outcome of an equal earlier request, or call; a failed outcome is not kept."""
        problem = (request.prompt, request.answer, request.task, request.fields_json)
        same = (*problem, request.response, request.finish_reason)
        key = blake3(msgspec.msgpack.encode(same)).digest(length=DIGEST_BYTES)
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
