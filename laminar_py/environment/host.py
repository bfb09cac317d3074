"""Environments of one process: each answers the turns of one trajectory. The environment worker owns the host.

A turn arrives with the whole response before it. If it was answered before, the host returns the same answer. Else
the environment takes it. If the environment is not in this process, the host rebuilds it: from its last snapshot,
or by replaying its actions if it is deterministic. The host saves an answer before it returns it, so an
environment that cannot replay never takes an answered turn twice (`tests/environment/test_host.py`).

**Saved turns.** Each trajectory has a file of frames. A frame is an attempt at a turn, or an answered turn with
the environment's state, if it can be saved. The controller deletes a file once the ledger has the trajectory's
end.
"""

import asyncio
import errno
import logging
import os
import struct
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
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
    HearsTokens,
    Observation,
    Restorable,
    Rewrite,
    SampledTurn,
    TokenWords,
)
from laminar_py.environment.writer import PlainWriter
from laminar_py.records.codec import DIGEST_BYTES, IntArray, decode, encode
from laminar_py.records.credit import credits_of
from laminar_py.records.environment import EnvironmentTurn, ModelTurn, TurnPart
from laminar_py.records.spans import ANEW, Span, context_of, turn_ends
from laminar_py.records.trajectory import DropReason

SUFFIX = ".environment"
KEPT_BYTES = 65_536  # a file longer than this, and than `KEPT_FRAMES` last frames, shrinks to its last frame
KEPT_FRAMES = 4
_HEAD = struct.Struct(f"<I{DIGEST_BYTES}s")  # length of the frame's body, and its digest


def environments_path(run: Path) -> Path:
    """Return the folder of saved turns in a run's folder."""
    return run / "environments"


class SavedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """An answered turn."""

    response_digest: bytes  # of the response up to that turn
    answer: EnvironmentTurn
    state: bytes | None = None  # of the environment after that turn; None if it is not `Restorable`


class TurnEntry(msgspec.Struct, frozen=True):
    """A frame of a file: an answered turn, or else an attempt at a turn."""

    saved: SavedTurn | None = None
    attempted: bytes = b""  # digest of the response up to the attempted turn


class TurnsOnFile(msgspec.Struct, frozen=True):
    """Content of a file: the last answered turn, and the number of attempts at the next one."""

    saved: SavedTurn | None = None
    attempts: int = 0


class SavedTurns:
    """Files of saved turns of one process, one for each running trajectory. All methods raise `OSError`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, trajectory_id: str, saved: SavedTurn) -> None:
        """Append an answered turn, and drop older frames once the file is long."""
        frame, path = _frame(TurnEntry(saved)), self._path(trajectory_id)
        if _append(path, frame) > max(KEPT_BYTES, KEPT_FRAMES * len(frame)):
            partial = _partial(path)
            partial.write_bytes(frame)
            os.replace(partial, path)

    def attempt(self, trajectory_id: str, digest: bytes) -> None:
        """Append an attempt at the turn that ends the response of this digest."""
        _append(self._path(trajectory_id), _frame(TurnEntry(attempted=digest)))

    def load(self, trajectory_id: str, digest: bytes) -> TurnsOnFile:
        """Read the file of a trajectory, which an earlier process may have written.

        It counts attempts at the turn of `digest`. A last frame that a crash cut off is removed from the file.
        """
        path, found = self._path(trajectory_id), TurnsOnFile()
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return found
        whole = 0
        for entry, end in _entries(data):
            whole = end
            if entry.saved is not None:
                found = TurnsOnFile(entry.saved)
            else:
                found = TurnsOnFile(found.saved, found.attempts + (entry.attempted == digest))
        if whole < len(data):
            os.truncate(path, whole)
        return found

    def names(self) -> list[str]:
        """List trajectories that have a file."""
        return sorted(path.stem for path in self._folder.glob(f"*{SUFFIX}"))

    def forget(self, trajectory_ids: Iterable[str]) -> None:
        """Delete the files of these trajectories."""
        for name in trajectory_ids:
            for path in (self._path(name), _partial(self._path(name))):
                path.unlink(missing_ok=True)

    def _path(self, trajectory_id: str) -> Path:
        return self._folder / f"{trajectory_id}{SUFFIX}"


def _partial(path: Path) -> Path:
    """Return the temporary file that replaces `path` by a rename."""
    return path.with_name(f"{path.name}.new")


def _frame(entry: TurnEntry) -> bytes:
    body = encode(entry)
    return _HEAD.pack(len(body), blake3(body).digest(length=DIGEST_BYTES)) + body


def _append(path: Path, frame: bytes) -> int:
    """Append a frame, whole or not at all, and return the new size of the file. Raises `OSError`."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        if file.write(frame) != len(frame):  # the disk is full
            file.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return file.tell()


def _entries(data: bytes) -> Iterator[tuple[TurnEntry, int]]:
    """Yield the entries of all complete frames, each with the offset of its end."""
    place = 0
    while place + _HEAD.size <= len(data):
        size, digest = _HEAD.unpack_from(data, place)
        body = data[place + _HEAD.size : place + _HEAD.size + size]
        if len(body) < size or blake3(body).digest(length=DIGEST_BYTES) != digest:
            return
        place += _HEAD.size + size
        yield decode(TurnEntry, body), place


log = logging.getLogger(__name__)

_NO_LOGPROBS = np.empty(0, np.float32)
MOST_ATTEMPTS = 3  # at a turn in which the process dies each time


@dataclass(slots=True, kw_only=True)
class Session:
    """An environment in this process, with the last turn it got and its answer."""

    environment: Environment | None  # None before it is ready, and once it is closed
    response_digest: bytes  # of the response up to its last turn
    answer: asyncio.Future[EnvironmentTurn]
    turn_start: int = -1  # number of response tokens before the model's next turn
    is_forgotten: bool = False  # `forget` came while the answer was in work


class EnvironmentHost:
    """Answers turns with environments from `make`, e.g. `EnvironmentHost(Guess, calls=calls, ...)`.

    It keeps at most `limits.most_kept` environments between turns, and closes those that are idle longest.
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

    def hear(self, parts: Sequence[TurnPart]) -> None:
        """Pass new tokens of running turns to environments that listen.

        An environment whose `hear` raises gets no more tokens of that turn until the turn is finished.
        """
        for part in parts:
            session = self._sessions.get(part.trajectory_id)
            environment = None if session is None else session.environment
            if (
                session is not None
                and session.turn_start == part.turn_start
                and isinstance(environment, HearsTokens)
            ):
                try:
                    environment.hear(part.place, part.ids, part.logprobs)
                except Exception as error:  # noqa: BLE001 - user code may raise anything; the turn goes on
                    session.turn_start = -1
                    reason = str(error) or type(error).__name__
                    log.warning("%s: hear failed, so no more tokens of this turn: %s", part.trajectory_id, reason)

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
            found = await work
        except CallFailedError as error:
            elapsed_s = time.monotonic() - began
            found = EnvironmentTurn(failure=error.reason, detail=str(error), elapsed_s=elapsed_s)
            self._close_environment(session)
        except BaseException as error:
            self._sessions = OrderedDict((n, one) for n, one in self._sessions.items() if one is not session)
            session.answer.set_exception(error)
            session.answer.exception()  # mark it as retrieved: perhaps no other request awaits it
            raise
        session.answer.set_result(found)
        if session.is_forgotten:
            self._close_environment(session)

    async def _answer_turn(self, turn: ModelTurn, session: Session, before: Session | None) -> EnvironmentTurn:
        is_here = before is not None and before.environment is not None
        on_file = TurnsOnFile() if is_here else self._saved.load(turn.trajectory_id, session.response_digest)
        saved = on_file.saved
        if saved is not None and saved.response_digest == session.response_digest:
            return saved.answer
        if on_file.attempts >= MOST_ATTEMPTS:
            detail = f"its process died {MOST_ATTEMPTS} times over this turn"
            raise CallFailedError(DropReason.ENVIRONMENT_LOST, detail)
        self._saved.attempt(turn.trajectory_id, session.response_digest)
        began = time.monotonic()
        session.environment = environment = await self._environment_before(turn, before, saved)
        taken = len(turn_ends(turn.spans))
        returned = await self._step_environment(environment, turn, taken)
        answer = self._encode_answer(returned, turn.response_ids, turn.spans, elapsed_s=time.monotonic() - began)
        if isinstance(environment, HearsTokens):
            answer = msgspec.structs.replace(answer, listens=environment.listens)
        if answer.ids is not None and taken >= self._limits.max_turns:
            answer = EnvironmentTurn(is_cut=True, elapsed_s=answer.elapsed_s)
        state = await self._state(environment) if answer.ids is not None else None
        self._saved.save(
            turn.trajectory_id, SavedTurn(response_digest=session.response_digest, answer=answer, state=state)
        )
        if answer.ids is None:
            self._close_environment(session)
        else:
            session.turn_start = len(turn.response_ids) + len(answer.ids)
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
        environment = await self._make_environment()
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
            detail = "its process died, and it can neither be restored nor repeated"
            raise CallFailedError(DropReason.ENVIRONMENT_LOST, detail)

    async def _make_environment(self) -> Environment:
        await self._calls.wait_for_start()
        environment: Environment = await self._calls.call(self._make)
        return environment

    async def _replay_turns(self, environment: Environment, turn: ModelTurn) -> None:
        """Replay all turns but the last. Raises `CallFailedError` if an answer differs from the recorded one."""
        for number, end in enumerate([0, *turn_ends(turn.spans)[:-1]]):
            before = tuple(span for span in turn.spans if span.end <= end)
            returned = await self._step_environment(environment, turn, number)
            answer = self._encode_answer(returned, turn.response_ids, before, elapsed_s=0.0)
            if not _is_same_answer(answer, turn, place=end):
                detail = f"its process died, and turn {number} was answered otherwise again"
                raise CallFailedError(DropReason.ENVIRONMENT_LOST, detail)

    async def _step_environment(self, environment: Environment, turn: ModelTurn, number: int) -> Answer:
        """Let an environment answer the turn with this number; 1 is the first, and 0 calls `reset`."""
        if not number:
            return await self._calls.answer(environment.reset, turn.problem)
        start, end = _place_of(turn, number)
        ids = turn.response_ids[start:end]
        if isinstance(environment, HearsTokens):
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
            return _encode_end(returned, num_turns=len(turn_ends(spans)), elapsed_s=elapsed_s)
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


def _encode_end(end: End, *, num_turns: int, elapsed_s: float) -> EnvironmentTurn:
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

    `ANEW` means that a new conversation begins, None that the answer continues at the end. Raises
    `CallFailedError` if the answer names a turn that does not exist.
    """
    if isinstance(returned, Rewrite) or (isinstance(returned, TokenWords) and not returned.after):
        return ANEW
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
    found = load_from_file(settings.path, field="environment.path")
    missing = next((name for name in ("reset", "step") if not callable(getattr(found, name, None))), None)
    if missing is not None:
        raise ConfigError(f"environment.path={settings.path}: has no {missing}; name a class with reset and step")
    yield cast(Callable[[], Environment], partial(found, **settings.arguments))


CLASS_KIND = EnvironmentKind(settings=ClassEnvironment, open=open_class)
