"""Environments of one process: each answers the turns of one trajectory. Runs in the process of `workers`.

A turn comes with all that was said before it. One that was answered has its answer again. Else the environment
takes it, which is here, or is rebuilt: from its last snapshot, or by its actions over again where it is
deterministic. Invariant: an answer is saved before it is told (`SavedTurns`), so no turn that was answered
is taken twice by an environment that cannot repeat it.

**Saved turns.** Each trajectory has a file of frames that lie end to end: a turn that is about to be taken, and a
turn that was, with the state if that is saved. The controller deletes the files of trajectories that are on record
as ended.
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
KEPT_BYTES = 65_536  # of a file, and as many times its last frame as `KEPT_FRAMES`; then that alone is kept
KEPT_FRAMES = 4
_HEAD = struct.Struct(f"<I{DIGEST_BYTES}s")  # bytes of a frame behind it, and their digest


def environments_path(run: Path) -> Path:
    """Folder of these files in a run's folder."""
    return run / "environments"


class SavedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that was answered, with what the environment was told until then."""

    told: bytes  # digest of the response that it was told
    answer: EnvironmentTurn
    state: bytes | None = None  # after that turn; None where the environment cannot be restored


class TurnEntry(msgspec.Struct, frozen=True):
    """Entry of a file: a turn that was answered, or else one that is about to be taken, by what was told."""

    saved: SavedTurn | None = None
    attempted: bytes = b""


class TurnsOnFile(msgspec.Struct, frozen=True):
    """Entries of a trajectory: the last turn that was answered, and attempts at one since then."""

    saved: SavedTurn | None = None
    attempts: int = 0


class SavedTurns:
    """Files of one process in `folder`, one for each trajectory that goes on. Raises `OSError`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, trajectory_id: str, saved: SavedTurn) -> None:
        """Write a turn that was answered."""
        frame, path = _frame(TurnEntry(saved)), self._path(trajectory_id)
        if _append(path, frame) > max(KEPT_BYTES, KEPT_FRAMES * len(frame)):
            partial = _partial(path)
            partial.write_bytes(frame)
            os.replace(partial, path)

    def attempt(self, trajectory_id: str, told: bytes) -> None:
        """Note that a turn is about to be taken."""
        _append(self._path(trajectory_id), _frame(TurnEntry(attempted=told)))

    def load(self, trajectory_id: str, told: bytes) -> TurnsOnFile:
        """Entries of a trajectory that came from a process before, and attempts at the turn of this digest.

        A frame that a death has cut off is taken off the file, so that others can follow.
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
                found = TurnsOnFile(found.saved, found.attempts + (entry.attempted == told))
        if whole < len(data):
            os.truncate(path, whole)
        return found

    def names(self) -> list[str]:
        """Trajectories of which there is something."""
        return sorted(path.stem for path in self._folder.glob(f"*{SUFFIX}"))

    def forget(self, trajectory_ids: Iterable[str]) -> None:
        """Delete what there is of these."""
        for name in trajectory_ids:
            for path in (self._path(name), _partial(self._path(name))):
                path.unlink(missing_ok=True)

    def _path(self, trajectory_id: str) -> Path:
        return self._folder / f"{trajectory_id}{SUFFIX}"


def _partial(path: Path) -> Path:
    """File that is about to take the place of another."""
    return path.with_name(f"{path.name}.new")


def _frame(entry: TurnEntry) -> bytes:
    body = encode(entry)
    return _HEAD.pack(len(body), blake3(body).digest(length=DIGEST_BYTES)) + body


def _append(path: Path, frame: bytes) -> int:
    """Write at the end of a file, whole or not at all; its bytes then. Raises `OSError`."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        if file.write(frame) != len(frame):  # the disk is full
            file.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return file.tell()


def _entries(data: bytes) -> Iterator[tuple[TurnEntry, int]]:
    """Entries from the beginning on, as far as frames are whole, each with where it ends."""
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
MOST_ATTEMPTS = 3  # of a turn over which the process dies each time


@dataclass(slots=True, kw_only=True)
class Session:
    """An environment, as far as it has come: the last turn that it was given, and its answer."""

    environment: Environment | None  # None once nothing is to come of it
    told: bytes  # digest of the response with that turn
    answer: asyncio.Future[EnvironmentTurn]
    turn_start: int = -1  # response tokens before the turn that follows the answer
    is_forgotten: bool = False  # while the answer was on its way


class EnvironmentHost:
    """Answers turns by environments that `make` gives, e.g. `EnvironmentHost(Guess, calls=calls, ...)`.

    At most `limits.most_kept` are kept between turns; the longest idle ones make room.
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
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # the longest idle first

    async def answer(self, turn: ModelTurn) -> EnvironmentTurn:
        """Answer of a trajectory's environment to its last turn, which it takes once however often asked."""
        told, name = _digest(turn.response_ids), turn.trajectory_id
        session = self._sessions.get(name)
        if session is None or session.told != told:
            before = self._sessions.pop(name, None)
            session = Session(environment=None, told=told, answer=asyncio.get_running_loop().create_future())
            self._sessions[name] = session
            await self._settle(session, self._take(turn, session, before))
            self._make_room(name)
        if self._sessions.get(name) is session:
            self._sessions.move_to_end(name)
        return await asyncio.shield(session.answer)

    def hear(self, parts: Sequence[TurnPart]) -> None:
        """Tell environments that listen what is sampled of turns that they have not got yet.

        One that fails over it hears no more of that turn before it has all of it.
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
                except Exception as error:  # noqa: BLE001 - whatever it is, the turn does not depend on it
                    session.turn_start = -1
                    said = str(error) or type(error).__name__
                    log.warning("%s: hear failed, so it has the whole turn alone: %s", part.trajectory_id, said)

    def forget(self, trajectory_ids: list[str]) -> None:
        """End the environments of trajectories of which no turn is to come.

        Their last answers stay in files: a trajectory whose end is not on record when all dies asks again.
        """
        for name in trajectory_ids:
            session = self._sessions.pop(name, None)
            if session is not None and session.answer.done():
                self._end(session)
            elif session is not None:
                session.is_forgotten = True

    async def _settle(self, session: Session, work: Coroutine[Any, Any, EnvironmentTurn]) -> None:
        """Have the answer of a session; what fails is an answer too."""
        began = time.monotonic()
        try:
            found = await work
        except CallFailedError as error:
            elapsed_s = time.monotonic() - began
            found = EnvironmentTurn(failure=error.reason, detail=str(error), elapsed_s=elapsed_s)
            self._end(session)
        except BaseException as error:
            self._sessions = OrderedDict((n, one) for n, one in self._sessions.items() if one is not session)
            session.answer.set_exception(error)
            session.answer.exception()  # whoever else waits hears of it; nobody may
            raise
        session.answer.set_result(found)
        if session.is_forgotten:
            self._end(session)

    async def _take(self, turn: ModelTurn, session: Session, before: Session | None) -> EnvironmentTurn:
        is_here = before is not None and before.environment is not None
        on_file = TurnsOnFile() if is_here else self._saved.load(turn.trajectory_id, session.told)
        saved = on_file.saved
        if saved is not None and saved.told == session.told:
            return saved.answer
        if on_file.attempts >= MOST_ATTEMPTS:
            detail = f"its process died {MOST_ATTEMPTS} times over this turn"
            raise CallFailedError(DropReason.ENVIRONMENT_LOST, detail)
        self._saved.attempt(turn.trajectory_id, session.told)
        began = time.monotonic()
        session.environment = environment = await self._ready(turn, before, saved)
        taken = len(turn_ends(turn.spans))
        returned = await self._step(environment, turn, taken)
        answer = self._told(returned, turn.response_ids, turn.spans, elapsed_s=time.monotonic() - began)
        if isinstance(environment, HearsTokens):
            answer = msgspec.structs.replace(answer, listens=environment.listens)
        if answer.ids is not None and taken >= self._limits.max_turns:
            answer = EnvironmentTurn(is_cut=True, elapsed_s=answer.elapsed_s)
        state = await self._state(environment) if answer.ids is not None else None
        self._saved.save(turn.trajectory_id, SavedTurn(told=session.told, answer=answer, state=state))
        if answer.ids is None:
            self._end(session)
        else:
            session.turn_start = len(turn.response_ids) + len(answer.ids)
        return answer

    async def _ready(self, turn: ModelTurn, before: Session | None, saved: SavedTurn | None) -> Environment:
        """The environment as it was before this turn. Raises `CallFailedError` where there is no way back."""
        start = _start_of_last_turn(turn)
        told = _digest(turn.response_ids[:start])
        if before is not None and before.environment is not None and before.told == told:
            return before.environment
        if before is not None:
            self._end(before)
        environment = await self._begin()
        try:
            await self._bring_back(environment, turn, saved if saved is not None and saved.told == told else None)
        except BaseException:
            self._calls.end(environment)
            raise
        return environment

    async def _bring_back(self, environment: Environment, turn: ModelTurn, saved: SavedTurn | None) -> None:
        """Have a new environment as it was before a turn. Raises `CallFailedError` where there is no way."""
        if not len(turn.response_ids):
            return
        if saved is not None and saved.state is not None:
            assert isinstance(environment, Restorable), "it saved a state"
            await self._calls.of(environment.restore, saved.state)
        elif getattr(environment, "deterministic", False):
            await self._repeat(environment, turn)
        else:
            detail = "its process died, and it can neither be restored nor repeated"
            raise CallFailedError(DropReason.ENVIRONMENT_LOST, detail)

    async def _begin(self) -> Environment:
        await self._calls.may_begin()
        environment: Environment = await self._calls.of(self._make)
        return environment

    async def _repeat(self, environment: Environment, turn: ModelTurn) -> None:
        """Take all turns but the last again, with the same answers. Raises `CallFailedError` where one differs."""
        for number, end in enumerate([0, *turn_ends(turn.spans)[:-1]]):
            before = tuple(span for span in turn.spans if span.end <= end)
            returned = await self._step(environment, turn, number)
            answer = self._told(returned, turn.response_ids, before, elapsed_s=0.0)
            if not _repeats(answer, turn, place=end):
                detail = f"its process died, and turn {number} was answered otherwise again"
                raise CallFailedError(DropReason.ENVIRONMENT_LOST, detail)

    async def _step(self, environment: Environment, turn: ModelTurn, number: int) -> Answer:
        """Give an environment a turn by its number, 1 the first, or the problem before that."""
        if not number:
            return await self._calls.answer(environment.reset, turn.problem)
        start, end = _place_of(turn, number)
        ids = turn.response_ids[start:end]
        if isinstance(environment, HearsTokens):
            is_last = end == len(turn.response_ids)
            logprobs = turn.logprobs if is_last else _NO_LOGPROBS
            is_cut = not self._writer.has_ended(ids)
            context = _context(turn, start, end)
            environment.take(SampledTurn(context=context, ids=ids, logprobs=logprobs, is_cut=is_cut))
        return await self._calls.answer(environment.step, self._writer.said(ids))

    def _told(
        self, returned: Answer, response_ids: IntArray, spans: tuple[Span, ...], *, elapsed_s: float
    ) -> EnvironmentTurn:
        """An answer to the turns of `spans`, as it goes back. Raises `CallFailedError` where it is none."""
        is_first = not turn_ends(spans)
        if isinstance(returned, End):
            if is_first:
                raise CallFailedError(DropReason.ENVIRONMENT_FAILED, "reset returned End; return an Observation")
            return _ended(returned, num_turns=len(turn_ends(spans)), elapsed_s=elapsed_s)
        if isinstance(returned, Observation) and not is_first and not returned.messages:
            raise CallFailedError(
                DropReason.ENVIRONMENT_FAILED, "step returned an Observation without a text; return End to end"
            )
        follows = _follows(returned, spans)
        behind = response_ids[: (spans[-1].end if spans else 0) if follows is None else max(follows, 0)]
        ids = self._ids(returned, is_first=is_first, is_cut=len(behind) > 0 and not self._writer.has_ended(behind))
        if not len(ids) and (not isinstance(returned, Observation) or not is_first):
            raise CallFailedError(DropReason.ENVIRONMENT_FAILED, "step returned an empty text; return End to end")
        if not len(ids) and returned.max_tokens is not None:
            detail = f"reset returned max_tokens={returned.max_tokens} without a text to keep it with; give a text"
            raise CallFailedError(DropReason.ENVIRONMENT_FAILED, detail)
        return EnvironmentTurn(ids=ids, follows=follows, max_tokens=returned.max_tokens, elapsed_s=elapsed_s)

    def _ids(self, said: Begin, *, is_first: bool, is_cut: bool) -> IntArray:
        """Ids of words behind a turn of the model; nothing ends that yet where it `is_cut` by its limit."""
        try:
            if isinstance(said, TokenWords):
                self._writer.check(said.ids)
                return said.ids
            if isinstance(said, Rewrite):
                return self._writer.anew(said)
            return self._writer.first(said) if is_first else self._writer.next(said, is_cut=is_cut)
        except (ValueError, RecursionError) as error:
            raise CallFailedError(DropReason.ENVIRONMENT_FAILED, str(error)) from error

    async def _state(self, environment: Environment) -> bytes | None:
        if not isinstance(environment, Restorable):
            return None
        state: object = await self._calls.of(environment.snapshot)
        if not isinstance(state, bytes):
            raise CallFailedError(
                DropReason.ENVIRONMENT_FAILED, f"snapshot returned a {type(state).__name__}; return bytes"
            )
        return state

    def _make_room(self, newest: str) -> None:
        """Let go of the longest idle, which are rebuilt if they are asked again."""
        idle = (name for name, one in list(self._sessions.items()) if one.answer.done() and name != newest)
        for name in islice(idle, max(0, len(self._sessions) - self._limits.most_kept)):
            self._end(self._sessions.pop(name))

    def _end(self, session: Session) -> None:
        """Have an environment end what it holds."""
        environment, session.environment = session.environment, None
        if environment is not None:
            self._calls.end(environment)


def _ended(end: End, *, num_turns: int, elapsed_s: float) -> EnvironmentTurn:
    """End of a trajectory of so many turns. Raises `CallFailedError` where its roles have not their rewards."""
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


def _follows(returned: Answer, spans: tuple[Span, ...]) -> int | None:
    """Place in the response that an answer goes back to, `ANEW` to nothing; None where it goes on at the end.

    Raises `CallFailedError` where the conversation has not so many turns.
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


def _repeats(answer: EnvironmentTurn, turn: ModelTurn, *, place: int) -> bool:
    """True where an answer is what is written at this place of the response."""
    spans = [span for span in turn.spans if span.start == place and span.version is None]
    written = spans[0] if spans else Span(None, place, place)
    ids = turn.response_ids[place : written.end].tolist()
    is_same = answer.follows == written.follows and answer.max_tokens == written.turn_limit
    return answer.ids is not None and answer.ids.tolist() == ids and is_same


def _place_of(turn: ModelTurn, number: int) -> tuple[int, int]:
    """Place [start, end) in the response of a turn of the model by its number, 1 the first."""
    end = turn_ends(turn.spans)[number - 1]
    return max((span.end for span in turn.spans if span.version is None and span.end <= end), default=0), end


def _context(turn: ModelTurn, start: int, end: int) -> IntArray:
    """Ids of the response that a turn of the model at [start, end) was sampled behind."""
    places = context_of([span for span in turn.spans if span.end <= end]).places
    return turn.response_ids[places[places < start]]


def _digest(ids: IntArray) -> bytes:
    return blake3(ids.tobytes()).digest(length=DIGEST_BYTES)


def _start_of_last_turn(turn: ModelTurn) -> int:
    """Response tokens that the environment had been told before this turn: up to what it wrote last."""
    return next((span.start for span in reversed(turn.spans) if span.version is None), 0)


@asynccontextmanager
async def open_class(
    settings: ClassEnvironment, home: EnvironmentHome
) -> AsyncIterator[Callable[[], Environment]]:
    """Maker of environments of `path/to/file.py:Class`. Raises `ConfigError` where there is none."""
    found = load_from_file(settings.path, field="environment.path")
    missing = next((name for name in ("reset", "step") if not callable(getattr(found, name, None))), None)
    if missing is not None:
        raise ConfigError(f"environment.path={settings.path}: has no {missing}; name a class with reset and step")
    yield cast(Callable[[], Environment], partial(found, **settings.arguments))


CLASS_KIND = EnvironmentKind(settings=ClassEnvironment, open=open_class)
