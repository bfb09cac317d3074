"""Environments of one process: each answers the turns of one trajectory. The environment worker owns the host.

A turn arrives with the whole response before it. If it was answered before, the host returns the same answer. Else
the environment takes it. If the environment is not in this process, the host rebuilds it: from its last snapshot,
or by replaying its actions if it is deterministic. The host saves an answer before it returns it, so an
environment that cannot replay never takes an answered turn twice (`tests/environment/test_host.py`).

**Saved turns.** Each trajectory has a file with its last answered turn and the environment's state after it, if it
can be saved. A second file counts attempts at the next turn. The controller deletes both once the ledger has the
trajectory's end.
"""

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from blake3 import blake3

from laminar_py.config.environment import ClassEnvironment, EnvironmentConfig, EnvironmentHome, EnvironmentKind
from laminar_py.config.registry import load_from_file
from laminar_py.config.section import ConfigError
from laminar_py.environment.calls import CallFailedError, EnvironmentCalls
from laminar_py.environment.protocol import (
    Answer,
    Begin,
    End,
    Environment,
    Observation,
    Restorable,
    Rewrite,
    SampledTurn,
    TokenWords,
    TurnListener,
)
from laminar_py.environment.writer import PlainWriter
from laminar_py.records.codec import DIGEST_BYTES, IntArray, decode, encode
from laminar_py.records.credit import credits_of
from laminar_py.records.environment import EnvironmentTurn, ModelTurn
from laminar_py.records.spans import NEW_CONVERSATION, Span, context_of, turn_ends
from laminar_py.records.trajectory import DropReason

log = logging.getLogger(__name__)

SUFFIX, ATTEMPTS = ".environment", ".attempts"  # of a trajectory's files
MOST_ATTEMPTS = 3  # at a turn over which the process crashes each time
_NO_LOGPROBS = np.empty(0, np.float32)


def environments_path(run: Path) -> Path:
    """Return the folder of saved turns in a run's folder."""
    return run / "environments"


class SavedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """An answered turn."""

    response_digest: bytes  # of the response up to that turn
    answer: EnvironmentTurn
    state: bytes | None = None  # of the environment after that turn; None if it is not `Restorable`


class SavedTurns:
    """Files of saved turns of one process, two for each running trajectory. All methods raise `OSError`.

    A crash of the process leaves either the old content of a file or the new one. A digest at the start of a file
    shows damage by a crash of the host.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, trajectory_id: str, saved: SavedTurn) -> None:
        """Replace the saved turn of a trajectory, and forget its attempts."""
        path, attempts = self._paths(trajectory_id)
        unfinished = path.with_name(f"{path.name}.new")
        body = encode(saved)
        unfinished.write_bytes(_digest_of_file(body) + body)
        with suppress(FileNotFoundError):  # the controller may forget a dropped trajectory at this moment
            os.replace(unfinished, path)
        attempts.unlink(missing_ok=True)

    def count_attempt(self, trajectory_id: str, digest: bytes) -> None:
        """Count an attempt at the turn that ends the response of this digest."""
        _, attempts = self._paths(trajectory_id)
        with attempts.open("a", encoding="ascii") as file:
            file.write(f"{digest.hex()}\n")

    def load(self, trajectory_id: str, digest: bytes) -> tuple[SavedTurn | None, int]:
        """Read the saved turn of a trajectory, and the number of attempts at the turn of `digest` after it.

        An earlier process may have written both. A file that a crash of the host has damaged counts as missing.
        """
        path, attempts = self._paths(trajectory_id)
        saved = None
        if path.exists():
            data = path.read_bytes()
            body = data[DIGEST_BYTES:]
            if _digest_of_file(body) == data[:DIGEST_BYTES]:
                saved = decode(SavedTurn, body)
            else:
                log.warning("%s is damaged, so its turn is taken again", path)
        return saved, attempts.read_text().split().count(digest.hex()) if attempts.exists() else 0

    def names(self) -> list[str]:
        """List trajectories that have a file."""
        return sorted({path.stem for suffix in (SUFFIX, ATTEMPTS) for path in self._folder.glob(f"*{suffix}")})

    def forget(self, trajectory_ids: Iterable[str]) -> None:
        """Delete the files of these trajectories."""
        for name in trajectory_ids:
            path, attempts = self._paths(name)
            for file in (path, path.with_name(f"{path.name}.new"), attempts):
                file.unlink(missing_ok=True)

    def _paths(self, trajectory_id: str) -> tuple[Path, Path]:
        """Return the files of a trajectory: of its saved turn, and of attempts at the next one."""
        return self._folder / f"{trajectory_id}{SUFFIX}", self._folder / f"{trajectory_id}{ATTEMPTS}"


def _digest_of_file(body: bytes) -> bytes:
    """Return the digest of a saved turn's bytes."""
    return blake3(body).digest(length=DIGEST_BYTES)


@dataclass(slots=True, kw_only=True)
class Session:
    """An environment in this process, with the last turn it got and its answer."""

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

        Their last answers stay in files: if the run crashes before the ledger has the trajectory's end, the
        trajectory asks again.
        """
        for name in trajectory_ids:
            session = self._sessions.pop(name, None)
            if session is not None and session.answer.done():
                self._close_environment(session)
            elif session is not None:
                session.is_forgotten = True

    async def _resolve_answer(self, session: Session, work: Coroutine[Any, Any, EnvironmentTurn]) -> None:
        """Run `work` and set the session's answer from it. A `CallFailedError` becomes an answer, too."""
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
        turn before. Raises `CallFailedError`, also after `MOST_ATTEMPTS` crashes over this turn.
        """
        is_here = before is not None and before.environment is not None
        saved, attempts = (None, 0) if is_here else self._saved.load(turn.trajectory_id, session.response_digest)
        if saved is not None and saved.response_digest == session.response_digest:
            return saved.answer
        if attempts >= MOST_ATTEMPTS:
            detail = f"its process crashed {MOST_ATTEMPTS} times over this turn"
            raise CallFailedError(DropReason.ENVIRONMENT_LOST, detail)
        self._saved.count_attempt(turn.trajectory_id, session.response_digest)
        began = time.monotonic()
        session.environment = environment = await self._environment_before(turn, before, saved)
        taken = len(turn_ends(turn.spans))
        returned = await self._step_environment(environment, turn, taken)
        answer = self._encode_answer(returned, turn.response_ids, turn.spans, elapsed_s=time.monotonic() - began)
        if answer.ids is not None and taken >= self._limits.max_turns:
            answer = EnvironmentTurn(is_cut=True, elapsed_s=answer.elapsed_s)
        state = await self._state(environment) if answer.ids is not None else None
        self._saved.save(
            turn.trajectory_id, SavedTurn(response_digest=session.response_digest, answer=answer, state=state)
        )
        if answer.ids is None:
            self._close_environment(session)
        return answer

    async def _environment_before(
        self, turn: ModelTurn, before: Session | None, saved: SavedTurn | None
    ) -> Environment:
        """Return the environment in its state before this turn.

        Raises `CallFailedError` if it cannot be rebuilt.
        """
        start = _start_of_last_turn(turn)
        digest = _digest(turn.response_ids[:start])
        if before is not None and before.environment is not None and before.response_digest == digest:
            return before.environment
        if before is not None:
            self._close_environment(before)
        environment: Environment = await self._calls.call(self._make)
        try:
            await self._restore_or_replay(
                environment, turn, saved if saved is not None and saved.response_digest == digest else None
            )
        except BaseException:
            self._calls.close_environment(environment)
            raise
        return environment

    async def _restore_or_replay(self, environment: Environment, turn: ModelTurn, saved: SavedTurn | None) -> None:
        """Bring a new environment into the state before a turn.

        Raises `CallFailedError` if it cannot be rebuilt.
        """
        if not len(turn.response_ids):
            return
        if saved is not None and saved.state is not None:
            assert isinstance(environment, Restorable), "it saved a state"
            await self._calls.call(environment.restore, saved.state)
        elif getattr(environment, "deterministic", False):
            await self._replay_turns(environment, turn)
        else:
            detail = "its process crashed, and it can neither be restored nor replayed"
            raise CallFailedError(DropReason.ENVIRONMENT_LOST, detail)

    async def _replay_turns(self, environment: Environment, turn: ModelTurn) -> None:
        """Replay all turns but the last. Raises `CallFailedError` if an answer differs from the recorded one."""
        for number, end in enumerate([0, *turn_ends(turn.spans)[:-1]]):
            before = tuple(span for span in turn.spans if span.end <= end)
            returned = await self._step_environment(environment, turn, number)
            answer = self._encode_answer(returned, turn.response_ids, before, elapsed_s=0.0)
            if not _is_same_answer(answer, turn, place=end):
                detail = f"its process crashed, and the replay answered turn {number} otherwise"
                raise CallFailedError(DropReason.ENVIRONMENT_LOST, detail)

    async def _step_environment(self, environment: Environment, turn: ModelTurn, number: int) -> Answer:
        """Let an environment answer the turn with this number; 1 is the first, and 0 calls `reset`."""
        if not number:
            return await self._calls.answer(environment.reset, turn.problem)
        start, end = _place_of(turn, number)
        ids = turn.response_ids[start:end]
        if isinstance(environment, TurnListener):
            is_last = end == len(turn.response_ids)
            logprobs = turn.logprobs if is_last else _NO_LOGPROBS
            is_cut = not self._writer.has_ended(ids)
            context = _context(turn, start, end)
            environment.receive_turn(SampledTurn(context=context, ids=ids, logprobs=logprobs, is_cut=is_cut))
        return await self._calls.answer(environment.step, self._writer.decode_turn(ids))

    def _encode_answer(
        self, returned: Answer, response_ids: IntArray, spans: tuple[Span, ...], *, elapsed_s: float
    ) -> EnvironmentTurn:
        """Encode an answer to the turns of `spans` for the replica.

        Raises `CallFailedError` if it is not valid.
        """
        is_first = not turn_ends(spans)
        if isinstance(returned, End):
            if is_first:
                raise CallFailedError(DropReason.ENVIRONMENT_FAILED, "reset returned End; return an Observation")
            return _encode_trajectory_end(returned, num_turns=len(turn_ends(spans)), elapsed_s=elapsed_s)
        if isinstance(returned, Observation) and not is_first and not returned.messages:
            raise CallFailedError(
                DropReason.ENVIRONMENT_FAILED, "step returned an Observation without a text; return End to end"
            )
        follows = _place_it_follows(returned, spans)
        behind = response_ids[: (spans[-1].end if spans else 0) if follows is None else max(follows, 0)]
        ids = self._encode_words(
            returned, is_first=is_first, is_cut=len(behind) > 0 and not self._writer.has_ended(behind)
        )
        if not len(ids) and (not isinstance(returned, Observation) or not is_first):
            raise CallFailedError(DropReason.ENVIRONMENT_FAILED, "step returned an empty text; return End to end")
        if not len(ids) and returned.max_tokens is not None:
            detail = f"reset returned max_tokens={returned.max_tokens} without a text to keep it with; give a text"
            raise CallFailedError(DropReason.ENVIRONMENT_FAILED, detail)
        return EnvironmentTurn(ids=ids, follows=follows, max_tokens=returned.max_tokens, elapsed_s=elapsed_s)

    def _encode_words(self, said: Begin, *, is_first: bool, is_cut: bool) -> IntArray:
        """Encode messages that follow a turn of the model.

        `is_cut`: a limit ended that turn, so no stop token did.
        """
        try:
            if isinstance(said, TokenWords):
                self._writer.check_ids(said.ids)
                return said.ids
            if isinstance(said, Rewrite):
                return self._writer.encode_conversation(said)
            return self._writer.encode_first(said) if is_first else self._writer.encode_next(said, is_cut=is_cut)
        except (ValueError, RecursionError) as error:
            raise CallFailedError(DropReason.ENVIRONMENT_FAILED, str(error)) from error

    async def _state(self, environment: Environment) -> bytes | None:
        if not isinstance(environment, Restorable):
            return None
        state: object = await self._calls.call(environment.snapshot)
        if not isinstance(state, bytes):
            raise CallFailedError(
                DropReason.ENVIRONMENT_FAILED, f"snapshot returned a {type(state).__name__}; return bytes"
            )
        return state

    def _close_idle(self, newest: str) -> None:
        """Close environments that are idle longest, beyond `most_kept`. A further turn rebuilds them."""
        idle = (name for name, one in list(self._sessions.items()) if one.answer.done() and name != newest)
        for name in islice(idle, max(0, len(self._sessions) - self._limits.most_kept)):
            self._close_environment(self._sessions.pop(name))

    def _close_environment(self, session: Session) -> None:
        """Close the environment of a session."""
        environment, session.environment = session.environment, None
        if environment is not None:
            self._calls.close_environment(environment)


def _encode_trajectory_end(end: End, *, num_turns: int, elapsed_s: float) -> EnvironmentTurn:
    """Encode the end of a trajectory. Raises `CallFailedError` if its roles do not match its turns or rewards."""
    if not isinstance(end.reward, Mapping):
        return EnvironmentTurn(ends=True, reward=end.reward, elapsed_s=elapsed_s)
    if len(end.roles) != num_turns:
        detail = f"End has roles of {len(end.roles)} turns, the model took {num_turns}; give one for each"
        raise CallFailedError(DropReason.ENVIRONMENT_FAILED, detail)
    try:
        roles = credits_of(end.reward, end.roles)
    except ValueError as error:
        raise CallFailedError(DropReason.ENVIRONMENT_FAILED, str(error)) from None
    reward = sum(credit.reward for credit in roles)
    return EnvironmentTurn(ends=True, reward=reward, roles=roles, elapsed_s=elapsed_s)


def _place_it_follows(returned: Answer, spans: tuple[Span, ...]) -> int | None:
    """Return the position in the response that an answer goes back to.

    `NEW_CONVERSATION` means that a new conversation begins, None that the answer continues at the end. Raises
    `CallFailedError` if the answer names a turn that does not exist.
    """
    if isinstance(returned, Rewrite) or (isinstance(returned, TokenWords) and not returned.after):
        return NEW_CONVERSATION
    if isinstance(returned, End) or returned.after is None:
        return None
    ends = turn_ends(spans)
    if returned.after > len(ends):
        said = f"{type(returned).__name__} after={returned.after}"
        detail = f"step returned {said} of {len(ends)} turns; go back to one of these"
        raise CallFailedError(DropReason.ENVIRONMENT_FAILED, detail)
    place = ends[returned.after - 1]
    return None if place == spans[-1].end else place


def _is_same_answer(answer: EnvironmentTurn, turn: ModelTurn, *, place: int) -> bool:
    """Return True if an answer equals the one recorded at this position of the response."""
    spans = [span for span in turn.spans if span.start == place and span.version is None]
    written = spans[0] if spans else Span(None, place, place)
    ids = turn.response_ids[place : written.end].tolist()
    is_same = answer.follows == written.follows and answer.max_tokens == written.turn_limit
    return answer.ids is not None and answer.ids.tolist() == ids and is_same


def _place_of(turn: ModelTurn, number: int) -> tuple[int, int]:
    """Return the range [start, end) of a model's turn in the response, by its number; 1 is the first."""
    end = turn_ends(turn.spans)[number - 1]
    return max((span.end for span in turn.spans if span.version is None and span.end <= end), default=0), end


def _context(turn: ModelTurn, start: int, end: int) -> IntArray:
    """Return the response tokens that were the context of the model's turn at [start, end)."""
    places = context_of([span for span in turn.spans if span.end <= end]).places
    return turn.response_ids[places[places < start]]


def _digest(ids: IntArray) -> bytes:
    return blake3(ids.tobytes()).digest(length=DIGEST_BYTES)


def _start_of_last_turn(turn: ModelTurn) -> int:
    """Return the length of the response before the environment's last answer and the model's turn after it."""
    return next((span.start for span in reversed(turn.spans) if span.version is None), 0)


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
