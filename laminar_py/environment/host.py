"""Environments of one process: each answers the turns of one trajectory. The environment worker owns the host.

A turn arrives with the whole response before it. If it was answered before, the host returns the same answer. Else
the environment takes it. If the environment is not in this process, the host rebuilds it: from its last snapshot,
or by replaying its actions if it is deterministic. The host saves an answer before it returns it, so an
environment that cannot replay never takes an answered turn twice (`tests/environment/test_host.py`).
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
from blake3 import blake3

from laminar_py.config.environment import ClassEnvironment, EnvironmentConfig, EnvironmentHome, EnvironmentKind
from laminar_py.config.registry import load_from_file
from laminar_py.config.section import ConfigError
from laminar_py.environment.answers import encode_answer, is_recorded_answer
from laminar_py.environment.calls import CallFailedError, EnvironmentCalls
from laminar_py.environment.protocol import Answer, Environment, Restorable, SampledTurn, TokenEnvironment
from laminar_py.environment.saved_turns import SavedTurn, SavedTurns
from laminar_py.environment.writer import PlainWriter
from laminar_py.records.codec import DIGEST_BYTES, IntArray
from laminar_py.records.environment import EnvironmentTurn, ModelTurn
from laminar_py.records.spans import context_of, last_answer, turn_ends
from laminar_py.records.stops import text_before_stop
from laminar_py.records.trajectory import DropReason

MAX_ATTEMPTS = 3  # at a turn over which the process crashes each time
_NO_LOGPROBS = np.empty(0, np.float32)


@dataclass(slots=True, kw_only=True)
class Session:
    """An environment in this process, with the digest of the last turn that it got and the answer to that turn."""

    environment: Environment | None  # None before it is ready, and once it is closed
    response_digest: bytes  # of the response up to its last turn
    answer: asyncio.Future[EnvironmentTurn]
    is_forgotten: bool = False  # `forget` came while the answer was in work


class EnvironmentHost:
    """Answers turns with environments from `make`, e.g. `EnvironmentHost(Guess, calls=calls, ...)`.

    It keeps at most `limits.most_kept` environments between turns, and closes the longest idle.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        *,
        calls: EnvironmentCalls,
        writer: PlainWriter,
        saved: SavedTurns,
        limits: EnvironmentConfig,
    ) -> None:
        self._make = make
        self._calls = calls
        self._writer = writer
        self._saved = saved
        self._limits = limits
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # by trajectory, the longest idle first

    async def answer(self, turn: ModelTurn) -> EnvironmentTurn:
        """Let a trajectory's environment answer the last turn. A repeated request gets the same answer."""
        digest, name = _digest(turn.response_ids), turn.trajectory_id
        session = self._sessions.get(name)
        if session is None or session.response_digest != digest:
            before = self._sessions.pop(name, None)
            session = Session(
                environment=None, response_digest=digest, answer=asyncio.get_running_loop().create_future()
            )
            self._sessions[name] = session
            await self._resolve_answer(session, self._answer_turn(turn, session, before))
            self._close_idle(name)
        if self._sessions.get(name) is session:
            self._sessions.move_to_end(name)
        return await asyncio.shield(session.answer)

    def forget(self, trajectory_ids: list[str]) -> None:
        """Close the environments of trajectories that have no further turn.

        Files keep the last answers: if the run crashes before the ledger has a trajectory's end, its replica asks
        for the last answer again.
        """
        for name in trajectory_ids:
            session = self._sessions.pop(name, None)
            if session is not None and session.answer.done():
                self._close_environment(session)
            elif session is not None:
                session.is_forgotten = True

    async def _resolve_answer(self, session: Session, work: Coroutine[Any, Any, EnvironmentTurn]) -> None:
        """Await `work`, and set the session's answer to its result or to the failure of a `CallFailedError`.

        Any other error ends the session; this call and all waiting requests raise it.
        """
        began = time.monotonic()
        try:
            answer = await work
        except CallFailedError as error:
            elapsed_s = time.monotonic() - began
            answer = EnvironmentTurn(failure=error.reason, detail=str(error), elapsed_s=elapsed_s)
            self._close_environment(session)
        except BaseException as error:
            self._sessions = OrderedDict(
                (name, other) for name, other in self._sessions.items() if other is not session
            )
            session.answer.set_exception(error)
            session.answer.exception()  # mark it as retrieved: perhaps no other request awaits it
            raise
        session.answer.set_result(answer)
        if session.is_forgotten:
            self._close_environment(session)

    async def _answer_turn(self, turn: ModelTurn, session: Session, before: Session | None) -> EnvironmentTurn:
        """Answer a turn that this process has not answered, and save the answer before returning it.

        A turn that an earlier process answered gets its saved answer. `before` is the trajectory's session of the
        turn before, if this process has one. Raises `CallFailedError`, also after `MAX_ATTEMPTS` crashes.
        """
        is_here = before is not None and before.environment is not None
        saved, attempts = (None, 0) if is_here else self._saved.load(turn.trajectory_id, session.response_digest)
        if saved is not None and saved.response_digest == session.response_digest:
            return saved.answer
        if attempts >= MAX_ATTEMPTS:
            detail = f"its process crashed {MAX_ATTEMPTS} times over this turn"
            raise CallFailedError(DropReason.ENVIRONMENT_LOST, detail)
        self._saved.count_attempt(turn.trajectory_id, session.response_digest)
        began = time.monotonic()
        session.environment = environment = await self._environment_before(turn, before, saved)
        num_turns = len(turn_ends(turn.spans))
        returned = await self._step_environment(environment, turn, num_turns)
        answer = encode_answer(
            returned,
            self._writer,
            response_ids=turn.response_ids,
            spans=turn.spans,
            elapsed_s=time.monotonic() - began,
        )
        if answer.ids is not None and num_turns >= self._limits.max_turns:
            answer = EnvironmentTurn(is_cut=True, elapsed_s=answer.elapsed_s)
        state = await self._snapshot(environment) if answer.ids is not None else None
        self._saved.save(
            turn.trajectory_id, SavedTurn(response_digest=session.response_digest, answer=answer, state=state)
        )
        if answer.ids is None:
            self._close_environment(session)
        return answer

    async def _environment_before(
        self, turn: ModelTurn, before: Session | None, saved: SavedTurn | None
    ) -> Environment:
        """Return the environment in its state before this turn: from the session `before`, or rebuilt.

        Raises `CallFailedError` if it cannot be rebuilt.
        """
        start = last_answer(turn.spans).start
        digest = _digest(turn.response_ids[:start])
        if before is not None and before.environment is not None and before.response_digest == digest:
            return before.environment
        if before is not None:
            self._close_environment(before)
        environment: Environment = await self._calls.call(self._make)
        try:
            is_turn_before = saved is not None and saved.response_digest == digest
            await self._restore_or_replay(environment, turn, saved if is_turn_before else None)
        except BaseException:
            self._calls.close_environment(environment)
            raise
        return environment

    async def _restore_or_replay(self, environment: Environment, turn: ModelTurn, saved: SavedTurn | None) -> None:
        """Bring a new environment into the state before a turn. Raises `CallFailedError` if that is impossible."""
        if not len(turn.response_ids):
            return
        if saved is not None and saved.state is not None:
            assert isinstance(environment, Restorable), "it saved a state"
            await self._calls.call(environment.restore, saved.state)
        elif getattr(environment, "deterministic", False):
            await self._replay_turns(environment, turn)
        else:
            detail = "it is closed or its process crashed; define snapshot and restore, or deterministic = True"
            raise CallFailedError(DropReason.ENVIRONMENT_LOST, detail)

    async def _replay_turns(self, environment: Environment, turn: ModelTurn) -> None:
        """Replay all turns but the last. Raises `CallFailedError` if an answer differs from the recorded one."""
        for number, end in enumerate([0, *turn_ends(turn.spans)[:-1]]):
            before = tuple(span for span in turn.spans if span.end <= end)
            returned = await self._step_environment(environment, turn, number)
            answer = encode_answer(
                returned, self._writer, response_ids=turn.response_ids, spans=before, elapsed_s=0.0
            )
            if not is_recorded_answer(answer, turn, start=end):
                detail = f"its process crashed, and the replay answered turn {number} differently"
                raise CallFailedError(DropReason.ENVIRONMENT_LOST, detail)

    async def _step_environment(self, environment: Environment, turn: ModelTurn, number: int) -> Answer:
        """Return the environment's answer to turn `number` (1 is the first), or of `reset` for 0."""
        if not number:
            return await self._calls.answer(environment.reset, turn.problem)
        end = turn_ends(turn.spans)[number - 1]
        until_end = [span for span in turn.spans if span.end <= end]
        answer = last_answer(until_end)  # before the turn
        ids = turn.response_ids[answer.end : end]
        text, has_stopped = text_before_stop(self._writer.decode_turn(ids), answer.stop)
        if not isinstance(environment, TokenEnvironment):
            return await self._calls.answer(environment.step, text)
        places = context_of(until_end).places  # of the turn and its context in the response
        sampled = SampledTurn(
            text=text,
            context=turn.response_ids[places[places < answer.end]],
            ids=ids,
            logprobs=turn.logprobs if end == len(turn.response_ids) else _NO_LOGPROBS,
            is_cut=not has_stopped and not self._writer.has_ended(ids),
        )
        return await self._calls.answer(environment.step_tokens, sampled)

    async def _snapshot(self, environment: Environment) -> bytes | None:
        """Return an environment's snapshot, None if it cannot make one. Raises `CallFailedError`."""
        if not isinstance(environment, Restorable):
            return None
        state: object = await self._calls.call(environment.snapshot)
        if not isinstance(state, bytes):
            raise CallFailedError(
                DropReason.ENVIRONMENT_FAILED, f"snapshot returned a {type(state).__name__}; return bytes"
            )
        return state

    def _close_idle(self, newest: str) -> None:
        """Close the longest idle environments beyond `most_kept`, but never `newest`; a turn rebuilds them."""
        sessions = list(self._sessions.items())
        idle = (name for name, session in sessions if session.answer.done() and name != newest)
        for name in islice(idle, max(0, len(self._sessions) - self._limits.most_kept)):
            self._close_environment(self._sessions.pop(name))

    def _close_environment(self, session: Session) -> None:
        """Close the environment of a session, if it has one."""
        environment, session.environment = session.environment, None
        if environment is not None:
            self._calls.close_environment(environment)


def _digest(ids: IntArray) -> bytes:
    return blake3(ids.tobytes()).digest(length=DIGEST_BYTES)


@asynccontextmanager
async def open_class(
    settings: ClassEnvironment, home: EnvironmentHome
) -> AsyncIterator[Callable[[], Environment]]:
    """Load `path/to/file.py:Class` and return a function that makes its environments. Raises `ConfigError`."""
    environment_class = load_from_file(settings.path, field="environment.path")
    missing = next(
        (name for name in ("reset", "step") if not callable(getattr(environment_class, name, None))), None
    )
    if missing is not None:
        raise ConfigError(f"environment.path={settings.path}: has no {missing}; name a class with reset and step")
    yield cast(Callable[[], Environment], partial(environment_class, **settings.arguments))


CLASS_KIND = EnvironmentKind(settings=ClassEnvironment, open=open_class)
