"""The trajectories that a replica runs in its engine. `rollout.replica` owns `Streams` and changes the weights.

A trajectory has one engine stream per turn. An engine pushes the deltas of a stream (`PushEngine`), or a task
reads them:

    OUTSIDE -> AWAY            its environment acts next
    AWAY -> OUTSIDE            the environment's answer was appended
    OUTSIDE -> IN_ENGINE       the engine serves
    IN_ENGINE -> OUTSIDE       a turn ended that an environment answers
    IN_ENGINE -> INTERRUPTED   new weights interrupt the stream (`interrupt`)
    INTERRUPTED -> OUTSIDE     the weights are loaded (`resume_interrupted`)
    any -> ENDED               the response ended, the engine refused the request, or the trajectory was aborted

Every token is reported once, in order, with the version that the engine stamped on it (law 2). If the engine is
lost, all delivered tokens are reported. A turn is in the journal before the environment gets the turn, so that
after any crash the environment gets the same turn again (law 9).
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from laminar_py.records.engine import Delta, EngineLostError, InferenceEngine, PauseMode, PushEngine, RefusedError
from laminar_py.records.environment import Environments, EnvironmentTurn
from laminar_py.records.pieces import PayloadLostError
from laminar_py.records.replica import Assignment
from laminar_py.records.spans import num_sampled
from laminar_py.records.stops import Decode
from laminar_py.records.trajectory import Cap, DropReason, FinishReason, InterruptReason, Kind
from laminar_py.rollout.outbox import Outbox
from laminar_py.rollout.running import RunningTrajectory, StreamState, begin, handed_back
from laminar_py.rollout.storing import ResponseStore

log = logging.getLogger(__name__)


class Callbacks:
    """Guards callbacks of an engine: a task of a task group waits for their first exception, and raises it."""

    def __init__(self) -> None:
        self._first_error: asyncio.Future[None] | None = None

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Start the task that raises the first exception."""
        first_error = self._first_error = asyncio.get_running_loop().create_future()

        async def raise_it() -> None:
            await first_error

        tasks.create_task(raise_it(), name="callbacks")

    def close(self) -> None:
        """End the task without an exception; later callbacks see `ended`."""
        if self._first_error is not None:
            self._first_error.cancel()

    @property
    def ended(self) -> bool:
        """Whether a callback has raised or `close` was called, so that callbacks must do nothing more."""
        return self._first_error is not None and self._first_error.done()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Run the body of a callback; log an exception and pass it to the task instead of raising it here."""
        try:
            yield
        except Exception as error:
            log.exception("a callback of a stream failed")
            if self._first_error is not None and not self._first_error.done():
                self._first_error.set_exception(error)


class Streams:
    """The trajectories of one replica; calls `on_ended()` after one leaves, `on_lost(error)` for a lost engine."""

    def __init__(
        self,
        engine: InferenceEngine,
        out: Outbox,
        store: ResponseStore,
        environments: Environments | None,
        decode: Decode = None,
        *,
        on_ended: Callable[[], None],
        on_lost: Callable[[EngineLostError], None],
    ) -> None:
        self.running: dict[str, RunningTrajectory] = {}  # by id, from `start` until ENDED
        self.serving = asyncio.Event()  # cleared while weights are loaded: nothing enters the engine
        self._engine = engine
        self._pushing = engine if isinstance(engine, PushEngine) else None
        self._out = out
        self._store = store
        self._on_ended = on_ended
        self._on_lost = on_lost
        self._environments = environments
        self._decode = decode  # for stop strings of environments
        self._callbacks = Callbacks()

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Run the tasks of all streams in a task group from now on."""
        self._tasks = tasks
        self._callbacks.open(tasks)

    def close(self) -> None:
        """Ignore later deltas of the engine, and wake all waiters for the ends of streams."""
        self._callbacks.close()
        for running in self.running.values():
            running.close_stream()

    @property
    def training(self) -> list[RunningTrajectory]:
        """The training trajectories."""
        return [running for running in self.running.values() if running.assignment.kind is Kind.TRAIN]

    @property
    def away(self) -> frozenset[str]:
        """Ids of trajectories whose environment answers a turn now."""
        if self._environments is None:
            return frozenset()
        return frozenset(name for name, running in self.running.items() if running.state is StreamState.AWAY)

    @property
    def held_s(self) -> float:
        """Seconds for which all trajectories have waited for environments; 0 unless all wait now."""
        if not all(running.state is StreamState.AWAY for running in self.running.values()):
            return 0.0
        last_s = max((running.away_since_s for running in self.running.values()), default=math.inf)
        return max(0.0, self._out.clock.now() - last_s)

    def start(self, assignment: Assignment) -> None:
        """Start an assignment; its request enters the engine when the engine serves."""
        running = begin(assignment, self._out.clock.now())
        self.running[assignment.trajectory_id] = running
        self._spawn(running)

    def hand_back(self, assignment: Assignment) -> None:
        """Report at once that an assignment did not start here, so that another replica gets it."""
        self._out.progress.append(handed_back(assignment))
        self._out.urgent.set()

    # ---- aborts and interruptions

    async def abort(self, trajectory_ids: Iterable[str]) -> None:
        """Abort trajectories by their ids: in the engine, whose last deltas then end them, or else at once."""
        wanted = [running for name in trajectory_ids if (running := self.running.get(name)) is not None]
        await asyncio.gather(*(self._abort(running) for running in wanted))

    async def give_up(self, trajectory_ids: Iterable[str]) -> None:
        """Abort trajectories by their ids, and wait until their open streams have ended."""
        wanted = [running for name in trajectory_ids if (running := self.running.get(name)) is not None]
        streams = [running.stream_end() for running in wanted if running.is_open]
        await asyncio.gather(*(self._abort(running) for running in wanted))
        if streams:
            await asyncio.wait(streams)

    async def interrupt(self) -> list[RunningTrajectory]:
        """Pause the engine, which aborts all open streams; wait for their ends, and return the trajectories."""
        interrupted = [running for running in self.running.values() if running.state is StreamState.IN_ENGINE]
        # only the streams of this moment: if one ends its turn now, its next stream waits for the weights anyway
        streams = [running.stream_end() for running in interrupted if running.is_open]
        for running in interrupted:
            running.state = StreamState.INTERRUPTED
        await self._engine.pause(PauseMode.ABORT)
        if streams:
            await asyncio.wait(streams)
        return interrupted

    def resume_interrupted(self, interrupted: Iterable[RunningTrajectory]) -> None:
        """Continue the interrupted trajectories that have not ended since."""
        for running in interrupted:
            if running.state is StreamState.INTERRUPTED:
                self._spawn(running)

    async def cut_overdue(self, max_seconds: float) -> None:
        """Abort trajectories that have generated for longer than `max_seconds`, so that they end as LENGTH."""
        now = self._out.clock.now()
        for running in list(self.running.values()):
            if running.first_token_s is not None and running.used_s(now) > max_seconds:
                running.cut = Cap.SECONDS
                await self._abort(running)

    def excuse(self, seconds: float) -> None:
        """Do not count the last `seconds`, in which the replica was held, as time of its trajectories."""
        for running in self.running.values():
            if running.first_token_s is not None:
                running.excused_s += seconds

    async def _abort(self, running: RunningTrajectory) -> None:
        """Abort a trajectory: in the engine, whose last delta then ends it, or here if no request runs."""
        if running.state is StreamState.ENDED:
            return  # it ended meanwhile
        if running.state is StreamState.IN_ENGINE:
            running.is_aborted = True
            await self._engine.abort(running.assignment.trajectory_id)
            return
        if running.task is not None:  # it waits for weights, or for its environment
            running.task.cancel()
        self._end(running, FinishReason.ABORT)

    # ---- journal and reports

    def save_partials(self) -> None:
        """Write the tokens of all running trajectories to the journal, as far as the journal lacks them."""
        now = self._out.clock.now()
        pieces = [running.pop_unjournaled(now) for running in self.running.values()]
        self._store.journal([piece for piece in pieces if piece is not None])

    def report_all(self) -> None:
        """Report all delivered tokens at once, until the store fails; later tokens are then lost."""
        with contextlib.suppress(EngineLostError):  # `StoreFullError`
            for running in self.running.values():
                if running.ids:
                    self._report(running, None)
        self._out.urgent.set()

    # ---- one stream

    def _spawn(self, running: RunningTrajectory) -> None:
        """Bring a trajectory into the engine: at once if it is free to enter a `PushEngine`, else by a task."""
        item, running.state = running.assignment, StreamState.OUTSIDE
        is_read = running.prefix is not None and running.earlier is not None
        is_free = is_read and item.problem is None and self.serving.is_set()
        if self._pushing is None or not is_free:
            running.task = self._tasks.create_task(self._generate(running), name=item.trajectory_id)
            return
        with self._callbacks.guarded():
            try:
                self._follow(running, self._pushing)
            except (EngineLostError, RefusedError) as error:
                self._break_off(running, error)

    async def _generate(self, running: RunningTrajectory) -> None:
        """Read a trajectory's stored texts, ask its environment if it acts next, await weights, run its stream."""
        if running.prefix is None and not await self._read_prefix(running):
            return
        if running.earlier is None:
            running.earlier = await self._store.read_earlier(running.assignment)
        try:
            if running.awaits_environment(self._decode) and not await self._ask_environment(running):
                return
            await self.serving.wait()
            if self._pushing is not None:
                self._follow(running, self._pushing)
                return
            running.state, running.is_open = StreamState.IN_ENGINE, True
            try:
                async for delta in self._engine.generate(running.request()):
                    self._receive(running, delta)
            finally:
                running.close_stream()
            self._start_next_turn(running)
        except (EngineLostError, RefusedError) as error:
            self._break_off(running, error)

    def _follow(self, running: RunningTrajectory, engine: PushEngine) -> None:
        """Submit a trajectory's request; the engine then calls `_on_pushed` for each delta."""
        running.state, running.is_open = StreamState.IN_ENGINE, True
        engine.follow(running.request(), partial(self._on_pushed, running))

    def _on_pushed(self, running: RunningTrajectory, pushed: Delta | EngineLostError) -> None:
        """Handle a delta that the engine pushes for a trajectory's stream, or the loss of the engine."""
        if self._callbacks.ended:
            return running.close_stream()
        with self._callbacks.guarded():
            try:
                if isinstance(pushed, EngineLostError):
                    raise pushed
                self._receive(running, pushed)
                if pushed.finish_reason is not None:
                    running.close_stream()
                    self._start_next_turn(running)
            except EngineLostError as error:
                self._break_off(running, error)

    def _receive(self, running: RunningTrajectory, delta: Delta) -> None:
        """Append a delta's tokens, and handle the stream's end, unless the trajectory has ended already."""
        if not self._is_current(running):
            return
        item, is_first = running.assignment, running.first_token_s is None
        if running.answer.stop:
            delta = running.cut_at_stop(delta, self._decode)
            if running.has_stopped and delta.finish_reason is None:
                self._tasks.create_task(self._stop_stream(running), name=f"stop-{item.trajectory_id}")
        running.append_delta(delta, self._out.clock.now())
        self._out.generated += len(delta.ids) if item.kind is Kind.TRAIN else 0
        if is_first and item.kind is Kind.EVAL and len(delta.ids) and item.version is None:
            self._out.report_first_token(item, delta.version)  # fixes the version of its pass
        if delta.finish_reason is not None:
            self._stream_ended(running, delta.finish_reason)

    async def _stop_stream(self, running: RunningTrajectory) -> None:
        """Abort the stream of a turn that a stop string has ended, unless the stream has ended already."""
        with contextlib.suppress(EngineLostError):  # the stream ends with this error, too
            if running.is_open and running.has_stopped:
                await self._engine.abort(running.assignment.trajectory_id)

    def _start_next_turn(self, running: RunningTrajectory) -> None:
        """Start the next turn, if the stream ended a turn that the trajectory's environment answers."""
        if running.state is StreamState.OUTSIDE:
            self._spawn(running)

    def _break_off(self, running: RunningTrajectory, error: EngineLostError | RefusedError) -> None:
        """End a stream: report its trajectory if the engine is lost, or drop it if the engine refuses it."""
        if isinstance(error, EngineLostError):
            if self._is_current(running):
                with contextlib.suppress(EngineLostError):  # the store may be lost too
                    self._report(running, None, broken=InterruptReason.ENGINE_LOST)
            self._on_lost(error)
        else:  # the request's fault, not the engine's
            name = running.assignment.trajectory_id
            log.error("replica %d: the engine refused trajectory %s: %s", self._out.index, name, error)
            if self._is_current(running):
                self._fail(running, DropReason.REFUSED, str(error))
        running.close_stream()

    def _is_current(self, running: RunningTrajectory) -> bool:
        """Whether a trajectory has not ended; its id may run here again, under a later epoch."""
        return self.running.get(running.assignment.trajectory_id) is running

    # ---- its environment

    async def _ask_environment(self, running: RunningTrajectory) -> bool:
        """Journal a turn, send it to the environment, apply the answer; return whether the model acts next."""
        name = running.assignment.trajectory_id
        assert self._environments is not None, f"{name} has an environment, but its replica reaches none"
        running.state, running.away_since_s = StreamState.AWAY, self._out.clock.now()
        piece = running.pop_unjournaled(self._out.clock.now())
        self._store.journal([] if piece is None else [piece])
        answer = await self._environments.answer(running.model_turn())
        running.environment_s += answer.elapsed_s
        running.state = StreamState.OUTSIDE
        return self._apply_answer(running, answer)

    def _apply_answer(self, running: RunningTrajectory, answer: EnvironmentTurn) -> bool:
        """Append an environment's answer, or end the trajectory; return whether the model acts next."""
        if answer.failure is not None:
            self._fail(running, answer.failure, answer.detail)
        elif answer.ends:
            running.reward, running.roles = answer.reward, answer.roles
            self._end(running, FinishReason.STOP)
        elif answer.is_cut:
            running.cut = Cap.TURNS
            self._end(running, FinishReason.LENGTH)
        else:
            assert answer.ids is not None, f"{running.assignment.trajectory_id}: its environment gave no tokens"
            if answer.follows is not None and running.routed:
                detail = "the environment went back in its conversation; rollout.record=routed_experts forbids it"
                self._fail(running, DropReason.ENVIRONMENT_FAILED, detail)
                return False
            ids, limit = answer.ids[: running.room], answer.max_tokens
            running.append_observation(ids, follows=answer.follows, max_tokens=limit, stop=answer.stop)
            if running.room:
                return True
            self._end_full(running)
        return False

    def _end_full(self, running: RunningTrajectory) -> None:
        """End a trajectory without room for another turn, as LENGTH, or as failed if it has no sampled token."""
        if num_sampled(running.all_spans):
            self._end(running, FinishReason.LENGTH)
        else:
            most = running.assignment.sampling.max_new_tokens
            detail = f"its environment's first message leaves no room for a turn within max_new_tokens={most}"
            self._fail(running, DropReason.ENVIRONMENT_FAILED, detail)

    def _fail(self, running: RunningTrajectory, reason: DropReason, detail: str) -> None:
        """Report that a trajectory can never continue, remove it here, and end its environment."""
        self._report(running, None, failure=reason, detail=detail)
        self._remove(running)
        self._end_environment(running)

    def _end_environment(self, running: RunningTrajectory) -> None:
        """Start a task that ends the trajectory's environment, if it has one, since no turn will follow."""
        item = running.assignment
        if self._environments is not None and item.problem is not None:
            forgotten = self._environments.forget(item.trajectory_id)
            self._tasks.create_task(forgotten, name=f"forget-{item.trajectory_id}")

    # ---- its tokens

    async def _read_prefix(self, running: RunningTrajectory) -> bool:
        """Read a trajectory's stored response; if it is lost, report that, remove the trajectory, return False."""
        try:
            response = await self._store.read(running.assignment)
            running.prefix, running.prefix_spans = response.ids, response.spans
            running.prefix_logprobs = response.logprobs
        except PayloadLostError as error:
            name = running.assignment.trajectory_id
            log.error("replica %d: stored tokens of trajectory %s are lost: %s", self._out.index, name, error)
            self._out.progress.append(handed_back(running.assignment, lost=str(error)))
            self._remove(running)
        return running.prefix is not None

    def _stream_ended(self, running: RunningTrajectory, reason: FinishReason) -> None:
        """Handle the end of a stream: an interruption, the end of a turn, or the end of the response."""
        overdue = running.cut is not None and running.length > 0
        continues = running.state is StreamState.INTERRUPTED and not running.is_aborted
        if reason is FinishReason.ABORT and continues and not overdue:
            self._report(running, None, broken=InterruptReason.NEW_WEIGHTS)
        elif running.turn_ended(reason):
            if running.is_aborted:  # its turn ended just before the abort reached the engine
                self._end(running, FinishReason.ABORT)
            else:
                running.state = StreamState.OUTSIDE
        else:
            self._end(running, reason)

    def _end(self, running: RunningTrajectory, reason: FinishReason) -> None:
        """Report a trajectory's end, remove it, and end its environment unless another replica continues it.

        With a `cut` the reason is LENGTH; a cut by seconds counts only if it aborted a response with tokens.
        """
        if running.cut is Cap.SECONDS and (reason is not FinishReason.ABORT or not running.length):
            running.cut = None
        if running.cut is not None:
            reason = FinishReason.LENGTH
        self._report(running, reason)
        self._remove(running)
        if reason is not FinishReason.ABORT:
            self._end_environment(running)

    def _remove(self, running: RunningTrajectory) -> None:
        """Remove a reported trajectory here and from the journal, call `on_ended`, and make the news urgent."""
        running.state = StreamState.ENDED
        self._store.forget(running.assignment.trajectory_id)
        del self.running[running.assignment.trajectory_id]
        self._on_ended()
        self._out.urgent.set()

    def _report(
        self,
        running: RunningTrajectory,
        reason: FinishReason | None,
        *,
        broken: InterruptReason | None = None,
        failure: DropReason | None = None,
        detail: str = "",
    ) -> None:
        """Store a trajectory's unreported tokens in the segment, and add its progress to the next report.

        `reason` is set if the response has finished; the others are as in `Progress`. Raises `StoreFullError`.
        """
        now = self._out.clock.now()
        piece = running.unreported(now)
        tokens = None if piece is None else self._store.keep(piece)
        self._out.progress.append(
            running.pop_progress(tokens, reason, now, broken=broken, failure=failure, detail=detail)
        )
