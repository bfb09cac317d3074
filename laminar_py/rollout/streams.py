"""The trajectories that a replica runs in its engine. Owned by `replica`, which says when weights change.

Each follows one stream of the engine for each turn, of which an engine tells, or which a task reads:

    OUTSIDE -> AWAY            its environment has the next word
    AWAY -> OUTSIDE            that was appended
    OUTSIDE -> IN_ENGINE       the engine serves
    IN_ENGINE -> OUTSIDE       a turn has ended that an environment answers
    IN_ENGINE -> INTERRUPTED   new weights break the stream off (`interrupt`)
    INTERRUPTED -> OUTSIDE     they are loaded (`resubmit`)
    any -> ENDED               the engine's last word, a refusal, or an abort

Invariant: every token is told once, in order, with the version that the engine stamped on it. When the engine
is lost, all that it gave is told. An environment is asked only once the turn is in the journal, so that whatever
dies it is asked the same again, and never another turn in its place.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable
from functools import partial

from laminar_py.records.engine import Delta, PauseMode
from laminar_py.records.environment import EnvironmentTurn
from laminar_py.records.pieces import PayloadLostError
from laminar_py.records.protocols import (
    EngineLostError,
    Environments,
    InferenceEngine,
    RefusedError,
    TellingEngine,
)
from laminar_py.records.replica import Assignment
from laminar_py.records.spans import num_sampled
from laminar_py.records.trajectory import Break, Cap, DropReason, FinishReason, Kind
from laminar_py.rollout.callbacks import Callbacks
from laminar_py.rollout.listeners import Listeners
from laminar_py.rollout.outbox import Outbox
from laminar_py.rollout.running import Running, StreamState, begin, handed_back
from laminar_py.rollout.storing import ResponseStore

log = logging.getLogger(__name__)


class Streams:
    """Trajectories on one replica; `ended()` is called whenever one leaves, `lost()` if the engine is."""

    def __init__(
        self,
        engine: InferenceEngine,
        out: Outbox,
        store: ResponseStore,
        environments: Environments | None,
        *,
        ended: Callable[[], None],
        lost: Callable[[EngineLostError], None],
    ) -> None:
        self.running: dict[str, Running] = {}
        self.serving = asyncio.Event()  # cleared while weights are loaded: nothing enters the engine
        self._engine = engine
        self._telling = engine if isinstance(engine, TellingEngine) else None
        self._out = out
        self._store = store
        self._left = ended
        self._lost = lost
        self._environments = environments
        self._callbacks = Callbacks()
        self._listeners = Listeners(environments, store, out.clock, callbacks=self._callbacks, lost=lost)

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Let the tasks of the streams run there."""
        self._tasks = tasks
        self._callbacks.open(tasks)

    def close(self) -> None:
        """Hear nothing more of the engine; who waits for a stream waits no longer."""
        self._callbacks.close()
        for running in self.running.values():
            running.close_stream()

    @property
    def training(self) -> list[Running]:
        """Trajectories that are not of an evaluation."""
        return [running for running in self.running.values() if running.assignment.kind is Kind.TRAIN]

    @property
    def away(self) -> frozenset[str]:
        """Trajectories whose environment works on a turn."""
        if self._environments is None:
            return frozenset()
        return frozenset(name for name, one in self.running.items() if one.state is StreamState.AWAY)

    @property
    def held_s(self) -> float:
        """Seconds for which all that is here has been away."""
        if not all(running.state is StreamState.AWAY for running in self.running.values()):
            return 0.0
        last_s = max((running.away_since_s for running in self.running.values()), default=math.inf)
        return max(0.0, self._out.clock.now() - last_s)

    def start(self, assignment: Assignment) -> None:
        """Let it enter the engine as soon as that serves."""
        running = begin(assignment, self._out.clock.now())
        self.running[assignment.trajectory_id] = running
        self._spawn(running)

    def hand_back(self, assignment: Assignment) -> None:
        """Report one that never started here."""
        self._out.progress.append(handed_back(assignment))
        self._out.urgent.set()

    # ---- ending them

    async def abort(self, trajectory_ids: Iterable[str]) -> None:
        """End these wherever they are; the last word of those in the engine is still to come."""
        wanted = [running for name in trajectory_ids if (running := self.running.get(name)) is not None]
        await asyncio.gather(*(self._abort(running) for running in wanted))

    async def give_up(self, trajectory_ids: Iterable[str]) -> None:
        """`abort`, and their last words are here."""
        wanted = [running for name in trajectory_ids if (running := self.running.get(name)) is not None]
        streams = [running.stream_end() for running in wanted if running.is_open]
        await self.abort(running.assignment.trajectory_id for running in wanted)
        if streams:
            await asyncio.wait(streams)

    async def interrupt(self) -> list[Running]:
        """Abort everything in the engine; returns what is to be submitted again."""
        interrupted = [one for one in self.running.values() if one.state is StreamState.IN_ENGINE]
        # of this moment: one whose turn ends meanwhile goes on in another stream, which waits for the weights
        streams = [running.stream_end() for running in interrupted if running.is_open]
        for running in interrupted:
            running.state = StreamState.INTERRUPTED
        await self._engine.pause(PauseMode.ABORT)
        if streams:  # else all that runs still waits to enter the engine
            await asyncio.wait(streams)
        return interrupted

    def resubmit(self, interrupted: Iterable[Running]) -> None:
        """Go on with those that were not ended meanwhile, where they stand."""
        for running in interrupted:
            if running.state is StreamState.INTERRUPTED:
                self._spawn(running)

    async def cut_overdue(self, max_seconds: float) -> None:
        """End those that have generated for longer."""
        now = self._out.clock.now()
        for running in list(self.running.values()):
            if running.first_token_s is not None and running.used_s(now) > max_seconds:
                running.cut = Cap.SECONDS
                await self._abort(running)

    async def _abort(self, running: Running) -> None:
        if running.state is StreamState.ENDED:
            return  # by itself, or by another abort, since this one was asked for
        if running.state is StreamState.IN_ENGINE:
            running.is_abandoned = True
            await self._engine.abort(running.assignment.trajectory_id)
            return
        if running.task is not None:  # it waits for weights, or for its environment
            running.task.cancel()
        self._end(running, FinishReason.ABORT)

    # ---- telling of them

    def note_partials(self, *, tells: bool) -> None:
        """Have the journal hold what running ones have got; or tell it, where somebody looks at it."""
        now = self._out.clock.now()
        if not tells:
            pieces = [running.note(now) for running in self.running.values()]
            self._store.note([piece for piece in pieces if piece is not None])
            return
        for running in self.running.values():
            if running.ids:
                self._tell(running, None)

    def tell_all(self) -> None:
        """Tell everything that the engine gave; what cannot be stored is not told."""
        with contextlib.suppress(EngineLostError):
            for running in self.running.values():
                if running.ids:
                    self._tell(running, None)
        self._out.urgent.set()

    # ---- one stream

    def _spawn(self, running: Running) -> None:
        """Bring it into the engine, at once where an engine tells of streams and nothing stands before that."""
        item, running.state = running.assignment, StreamState.OUTSIDE
        is_free = running.prefix is not None and item.problem is None and self.serving.is_set()
        if self._telling is None or not is_free:
            running.task = self._tasks.create_task(self._generate(running), name=item.trajectory_id)
            return
        with self._callbacks.guarded():
            try:
                self._follow(running, self._telling)
            except (EngineLostError, RefusedError) as error:
                self._break_off(running, error)

    async def _generate(self, running: Running) -> None:
        """Bring it into the engine once nothing stands before that, and read its stream if nobody tells of it."""
        if running.prefix is None and not await self._read_prefix(running):
            return
        try:
            if running.awaits_environment and not await self._ask_environment(running):
                return
            await self.serving.wait()
            if self._telling is not None:
                self._follow(running, self._telling)
                return
            await self._read(running)
            self._go_on(running)
        except (EngineLostError, RefusedError) as error:
            self._break_off(running, error)

    def _follow(self, running: Running, engine: TellingEngine) -> None:
        running.state, running.is_open = StreamState.IN_ENGINE, True
        engine.follow(running.request(), partial(self._hear, running))

    def _hear(self, running: Running, news: Delta | EngineLostError) -> None:
        """Take in what an engine tells of a stream."""
        if self._callbacks.ended:
            return running.close_stream()
        with self._callbacks.guarded():
            try:
                if isinstance(news, EngineLostError):
                    raise news
                self._receive(running, news)
                if news.finish_reason is not None:
                    running.close_stream()
                    self._go_on(running)
            except EngineLostError as error:
                self._break_off(running, error)

    async def _read(self, running: Running) -> None:
        """Read a stream of the engine to its end."""
        running.state, running.is_open = StreamState.IN_ENGINE, True
        try:
            async for delta in self._engine.generate(running.request()):
                self._receive(running, delta)
        finally:
            running.close_stream()

    def _receive(self, running: Running, delta: Delta) -> None:
        if self._has(running):  # else it was ended outside the engine
            self._take(running, delta)
            if delta.finish_reason is not None:
                self._stream_ended(running, delta.finish_reason)

    def _go_on(self, running: Running) -> None:
        """Have its environment asked where a turn has ended; who waits for its stream waits no longer."""
        if running.state is StreamState.OUTSIDE:
            self._spawn(running)

    def _break_off(self, running: Running, error: EngineLostError | RefusedError) -> None:
        """Tell what there is of one whose engine is lost, or drop one that the engine refuses."""
        if isinstance(error, EngineLostError):
            if self._has(running):
                with contextlib.suppress(EngineLostError):  # nothing can be stored either
                    self._tell(running, None, broken=Break.CUT)
            self._lost(error)
        else:  # the request's fault, not the engine's
            log.error("replica %d: %s", self._out.index, error)
            if self._has(running):
                self._fail(running, DropReason.REFUSED, str(error))
        running.close_stream()

    def _has(self, running: Running) -> bool:
        """True where it was not ended meanwhile."""
        return self.running.get(running.assignment.trajectory_id) is running

    # ---- its environment

    async def _ask_environment(self, running: Running) -> bool:
        """Let its environment take the turn; True where the model has the next one."""
        assert self._environments is not None, f"{running.assignment.trajectory_id} has an environment"
        running.state, running.away_since_s = StreamState.AWAY, self._out.clock.now()
        noted = running.note(self._out.clock.now())
        self._store.note([] if noted is None else [noted])
        answer = await self._environments.answer(running.turn())
        running.environment_s += answer.elapsed_s
        running.state = StreamState.OUTSIDE
        return self._heed(running, answer)

    def _heed(self, running: Running, answer: EnvironmentTurn) -> bool:
        """Take in what an environment did with a turn; True where the model has the next one."""
        if answer.failure is not None:
            self._fail(running, answer.failure, answer.detail)
        elif answer.ends:
            running.reward, running.roles = answer.reward, answer.roles
            self._end(running, FinishReason.STOP)
        elif answer.is_cut:
            running.cut = Cap.TURNS
            self._end(running, FinishReason.LENGTH)
        else:
            assert answer.ids is not None, f"{running.assignment.trajectory_id}: its environment says nothing"
            if answer.follows is not None and running.routed:
                detail = "it went back in its conversation, where engines record experts (rollout.record)"
                self._fail(running, DropReason.ENVIRONMENT_FAILED, detail)
                return False
            running.observe(answer.ids[: running.room], follows=answer.follows, max_tokens=answer.max_tokens)
            running.begin_turn(listens=answer.listens)
            if running.room:
                return True
            self._end_full(running)
        return False

    def _end_full(self, running: Running) -> None:
        """End one whose environment has left no room for another turn; one without any has nothing to train on."""
        if num_sampled(running.all_spans):
            self._end(running, FinishReason.LENGTH)
        else:
            most = running.assignment.sampling.max_new_tokens
            detail = f"its first words leave no room for a turn within rollout.sampling.max_new_tokens={most}"
            self._fail(running, DropReason.ENVIRONMENT_FAILED, detail)

    def _fail(self, running: Running, reason: DropReason, detail: str) -> None:
        """Tell that one can never go on."""
        self._tell(running, None, failure=reason, detail=detail)
        self._remove(running)
        self._forget(running)

    def _forget(self, running: Running) -> None:
        """Have its environment end, now that all is stored which it said."""
        item = running.assignment
        if self._environments is not None and item.problem is not None:
            forgotten = self._environments.forget(item.trajectory_id)
            self._tasks.create_task(forgotten, name=f"forget-{item.trajectory_id}")

    # ---- what it delivers

    async def _read_prefix(self, running: Running) -> bool:
        """Read what it has of a response; False where that is lost, and it is handed back."""
        try:
            response = await self._store.read(running.assignment)
            running.prefix, running.told_spans = response.ids, response.spans
            running.told_logprobs = response.logprobs
        except PayloadLostError as error:
            log.error("replica %d: %s: %s", self._out.index, running.assignment.trajectory_id, error)
            self._out.progress.append(handed_back(running.assignment, lost=str(error)))
            self._remove(running)
        return running.prefix is not None

    def _take(self, running: Running, delta: Delta) -> None:
        item, is_first = running.assignment, running.first_token_s is None
        running.take(delta, self._out.clock.now())
        self._out.generated += len(delta.ids) if item.kind is Kind.TRAIN else 0
        if is_first and item.kind is Kind.EVAL and len(delta.ids) and item.version is None:
            self._out.begin(item, delta.version)  # the rest of its pass may follow to other replicas
        if running.listens:
            self._listeners.heard(running)

    def _stream_ended(self, running: Running, reason: FinishReason) -> None:
        """Take in the engine's last word, after which a trajectory that new weights interrupted goes on."""
        overdue = running.cut is not None and running.length > 0
        goes_on = running.state is StreamState.INTERRUPTED and not running.is_abandoned
        if reason is FinishReason.ABORT and goes_on and not overdue:
            self._tell(running, None, broken=Break.NEW_WEIGHTS)
        elif running.turn_ended(reason):
            if running.is_abandoned:  # it ended its turn just before it was aborted
                self._end(running, FinishReason.ABORT)
            else:
                running.state = StreamState.OUTSIDE
        else:
            self._end(running, reason)

    def _end(self, running: Running, reason: FinishReason) -> None:
        if running.cut is Cap.SECONDS and (reason is not FinishReason.ABORT or not running.length):
            running.cut = None  # it ended by itself
        if running.cut is not None:
            reason = FinishReason.LENGTH
        self._tell(running, reason)
        self._remove(running)
        if reason is not FinishReason.ABORT:
            self._forget(running)

    def _remove(self, running: Running) -> None:
        running.state = StreamState.ENDED
        self._store.forget(running.assignment.trajectory_id)
        del self.running[running.assignment.trajectory_id]
        self._left()
        self._out.urgent.set()

    def _tell(
        self,
        running: Running,
        reason: FinishReason | None,
        *,
        broken: Break | None = None,
        failure: DropReason | None = None,
        detail: str = "",
    ) -> None:
        now = self._out.clock.now()
        piece = running.piece(now)
        tokens = None if piece is None else self._store.keep(piece)
        self._out.progress.append(
            running.progress(tokens, reason, now, broken=broken, failure=failure, detail=detail)
        )
