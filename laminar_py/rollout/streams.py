"""The trajectories that a replica runs in its engine. `rollout.replica` owns `Streams` and changes the weights.

A trajectory has one engine stream per turn. An engine pushes the deltas of a stream (`PushEngine`), or a task
reads them:

    OUTSIDE -> AWAY            its environment acts next
    AWAY -> OUTSIDE            the environment's answer was appended
    OUTSIDE -> IN_ENGINE       the engine serves
    IN_ENGINE -> OUTSIDE       a turn ended that an environment answers
    IN_ENGINE -> INTERRUPTED   new weights interrupt the stream (`interrupt`)
    INTERRUPTED -> OUTSIDE     the weights are loaded (`resume_interrupted`)
    any -> ENDED               the response ended, the engine refused it, or it was aborted

Every token is reported once, in order, with the version that the engine stamped on it (law 2). If the engine is
lost, all delivered tokens are reported. A turn is in the journal before the environment gets it, so that after any
crash the environment gets the same turn again (law 9).
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
from laminar_py.records.trajectory import Cap, DropReason, FinishReason, InterruptReason, Kind
from laminar_py.rollout.outbox import Outbox
from laminar_py.rollout.running import RunningTrajectory, StreamState, begin, handed_back
from laminar_py.rollout.storing import ResponseStore

log = logging.getLogger(__name__)


class Callbacks:
    """Guards callbacks of an engine or the event loop: a task of a task group raises their first exception."""

    def __init__(self) -> None:
        self._mistake: asyncio.Future[None] | None = None

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Start the task that raises the first exception."""
        self._mistake = asyncio.get_running_loop().create_future()
        tasks.create_task(_raise(self._mistake), name="callbacks")

    def close(self) -> None:
        """Cancel the task."""
        if self._mistake is not None:
            self._mistake.cancel()

    @property
    def ended(self) -> bool:
        """Whether the task group is ending, so that callbacks do nothing more."""
        return self._mistake is not None and self._mistake.done()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Run a callback's body; log its exception and pass it to the task."""
        try:
            yield
        except Exception as error:  # the task raises it
            log.exception("a callback failed")
            if self._mistake is not None and not self._mistake.done():
                self._mistake.set_exception(error)


async def _raise(mistake: asyncio.Future[None]) -> None:
    await mistake


class Streams:
    """Trajectories on one replica; calls `ended()` when one leaves, `lost(error)` if the engine is lost."""

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
        self.running: dict[str, RunningTrajectory] = {}
        self.serving = asyncio.Event()  # cleared while weights are loaded: nothing enters the engine
        self._engine = engine
        self._pushing = engine if isinstance(engine, PushEngine) else None
        self._out = out
        self._store = store
        self._left = ended
        self._lost = lost
        self._environments = environments
        self._callbacks = Callbacks()

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Run the tasks of streams in a task group."""
        self._tasks = tasks
        self._callbacks.open(tasks)

    def close(self) -> None:
        """Ignore the engine from now on, and wake waiters for streams."""
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
        return frozenset(name for name, one in self.running.items() if one.state is StreamState.AWAY)

    @property
    def held_s(self) -> float:
        """Seconds for which all trajectories have waited for environments; 0 if any has not."""
        if not all(running.state is StreamState.AWAY for running in self.running.values()):
            return 0.0
        last_s = max((running.away_since_s for running in self.running.values()), default=math.inf)
        return max(0.0, self._out.clock.now() - last_s)

    def start(self, assignment: Assignment) -> None:
        """Start an assignment; it enters the engine when the engine serves."""
        running = begin(assignment, self._out.clock.now())
        self.running[assignment.trajectory_id] = running
        self._spawn(running)

    def hand_back(self, assignment: Assignment) -> None:
        """Report an assignment that never started here."""
        self._out.progress.append(handed_back(assignment))
        self._out.urgent.set()

    # ---- ending them

    async def abort(self, trajectory_ids: Iterable[str]) -> None:
        """Abort trajectories; the engine still delivers the ends of open streams."""
        wanted = [running for name in trajectory_ids if (running := self.running.get(name)) is not None]
        await asyncio.gather(*(self._abort(running) for running in wanted))

    async def give_up(self, trajectory_ids: Iterable[str]) -> None:
        """Abort trajectories, and wait for the ends of their streams."""
        wanted = [running for name in trajectory_ids if (running := self.running.get(name)) is not None]
        streams = [running.stream_end() for running in wanted if running.is_open]
        await self.abort(running.assignment.trajectory_id for running in wanted)
        if streams:
            await asyncio.wait(streams)

    async def interrupt(self) -> list[RunningTrajectory]:
        """Abort all streams for new weights, and return their trajectories for `resume_interrupted`."""
        interrupted = [running for running in self.running.values() if running.state is StreamState.IN_ENGINE]
        # only streams of this moment: a turn that ends meanwhile starts a new stream, which waits for the weights
        streams = [running.stream_end() for running in interrupted if running.is_open]
        for running in interrupted:
            running.state = StreamState.INTERRUPTED
        await self._engine.pause(PauseMode.ABORT)
        if streams:  # else all that runs still waits to enter the engine
            await asyncio.wait(streams)
        return interrupted

    def resume_interrupted(self, interrupted: Iterable[RunningTrajectory]) -> None:
        """Continue interrupted trajectories that did not end meanwhile."""
        for running in interrupted:
            if running.state is StreamState.INTERRUPTED:
                self._spawn(running)

    async def cut_overdue(self, max_seconds: float) -> None:
        """Abort trajectories that have generated for longer than `max_seconds`."""
        now = self._out.clock.now()
        for running in list(self.running.values()):
            if running.first_token_s is not None and running.used_s(now) > max_seconds:
                running.cut = Cap.SECONDS
                await self._abort(running)

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

    # ---- reporting them

    def save_partials(self) -> None:
        """Write new tokens of running trajectories to the journal."""
        now = self._out.clock.now()
        pieces = [running.pop_unjournaled(now) for running in self.running.values()]
        self._store.journal([piece for piece in pieces if piece is not None])

    def report_all(self) -> None:
        """Report all delivered tokens; tokens that cannot be stored are lost."""
        with contextlib.suppress(EngineLostError):
            for running in self.running.values():
                if running.ids:
                    self._report(running, None)
        self._out.urgent.set()

    # ---- one stream

    def _spawn(self, running: RunningTrajectory) -> None:
        """Bring a trajectory into the engine, without a task if it can enter at once and the engine pushes."""
        item, running.state = running.assignment, StreamState.OUTSIDE
        is_free = running.prefix is not None and item.problem is None and self.serving.is_set()
        if self._pushing is None or not is_free:
            running.task = self._tasks.create_task(self._generate(running), name=item.trajectory_id)
            return
        with self._callbacks.guarded():
            try:
                self._follow(running, self._pushing)
            except (EngineLostError, RefusedError) as error:
                self._break_off(running, error)

    async def _generate(self, running: RunningTrajectory) -> None:
        """Read its prefix, ask its environment, wait until the engine serves; then run its stream."""
        if running.prefix is None and not await self._read_prefix(running):
            return
        try:
            if running.awaits_environment and not await self._ask_environment(running):
                return
            await self.serving.wait()
            if self._pushing is not None:
                self._follow(running, self._pushing)
                return
            await self._read(running)
            self._go_on(running)
        except (EngineLostError, RefusedError) as error:
            self._break_off(running, error)

    def _follow(self, running: RunningTrajectory, engine: PushEngine) -> None:
        running.state, running.is_open = StreamState.IN_ENGINE, True
        engine.follow(running.request(), partial(self._hear, running))

    def _hear(self, running: RunningTrajectory, news: Delta | EngineLostError) -> None:
        """Handle a delta, or the error, that the engine pushes for a stream."""
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

    async def _read(self, running: RunningTrajectory) -> None:
        """Read an engine stream to its end."""
        running.state, running.is_open = StreamState.IN_ENGINE, True
        try:
            async for delta in self._engine.generate(running.request()):
                self._receive(running, delta)
        finally:
            running.close_stream()

    def _receive(self, running: RunningTrajectory, delta: Delta) -> None:
        if self._has(running):  # it may have ended outside the engine
            self._append(running, delta)
            if delta.finish_reason is not None:
                self._stream_ended(running, delta.finish_reason)

    def _go_on(self, running: RunningTrajectory) -> None:
        """Start the next turn, if the stream ended a turn that its environment answers."""
        if running.state is StreamState.OUTSIDE:
            self._spawn(running)

    def _break_off(self, running: RunningTrajectory, error: EngineLostError | RefusedError) -> None:
        """Report a trajectory whose engine is lost, or drop a trajectory that the engine refuses."""
        if isinstance(error, EngineLostError):
            if self._has(running):
                with contextlib.suppress(EngineLostError):  # the store may be lost too
                    self._report(running, None, broken=InterruptReason.ENGINE_LOST)
            self._lost(error)
        else:  # the request's fault, not the engine's
            log.error("replica %d: %s", self._out.index, error)
            if self._has(running):
                self._fail(running, DropReason.REFUSED, str(error))
        running.close_stream()

    def _has(self, running: RunningTrajectory) -> bool:
        """Whether a trajectory has not ended meanwhile."""
        return self.running.get(running.assignment.trajectory_id) is running

    # ---- its environment

    async def _ask_environment(self, running: RunningTrajectory) -> bool:
        """Send the turn to its environment; return whether the model acts next."""
        assert self._environments is not None, f"{running.assignment.trajectory_id} has an environment"
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
                detail = "it went back in its conversation, but rollout.record records experts"
                self._fail(running, DropReason.ENVIRONMENT_FAILED, detail)
                return False
            running.append_observation(
                answer.ids[: running.room], follows=answer.follows, max_tokens=answer.max_tokens
            )
            if running.room:
                return True
            self._end_full(running)
        return False

    def _end_full(self, running: RunningTrajectory) -> None:
        """End a trajectory without room for another turn; fail it if it has no turn to train on."""
        if num_sampled(running.all_spans):
            self._end(running, FinishReason.LENGTH)
        else:
            most = running.assignment.sampling.max_new_tokens
            detail = f"its environment's first message leaves no room for a turn within max_new_tokens={most}"
            self._fail(running, DropReason.ENVIRONMENT_FAILED, detail)

    def _fail(self, running: RunningTrajectory, reason: DropReason, detail: str) -> None:
        """Report that a trajectory cannot continue."""
        self._report(running, None, failure=reason, detail=detail)
        self._remove(running)
        self._forget(running)

    def _forget(self, running: RunningTrajectory) -> None:
        """End its environment, since all of its answers are stored."""
        item = running.assignment
        if self._environments is not None and item.problem is not None:
            forgotten = self._environments.forget(item.trajectory_id)
            self._tasks.create_task(forgotten, name=f"forget-{item.trajectory_id}")

    # ---- its tokens

    async def _read_prefix(self, running: RunningTrajectory) -> bool:
        """Read its stored response; if that is lost, hand it back and return False."""
        try:
            response = await self._store.read(running.assignment)
            running.prefix, running.prefix_spans = response.ids, response.spans
            running.prefix_logprobs = response.logprobs
        except PayloadLostError as error:
            log.error("replica %d: %s: %s", self._out.index, running.assignment.trajectory_id, error)
            self._out.progress.append(handed_back(running.assignment, lost=str(error)))
            self._remove(running)
        return running.prefix is not None

    def _append(self, running: RunningTrajectory, delta: Delta) -> None:
        item, is_first = running.assignment, running.first_token_s is None
        running.append_delta(delta, self._out.clock.now())
        self._out.generated += len(delta.ids) if item.kind is Kind.TRAIN else 0
        if is_first and item.kind is Kind.EVAL and len(delta.ids) and item.version is None:
            self._out.report_first_token(item, delta.version)  # fixes the version of its pass

    def _stream_ended(self, running: RunningTrajectory, reason: FinishReason) -> None:
        """Handle the end of a stream: an interruption, the end of a turn, or the end of the response."""
        overdue = running.cut is not None and running.length > 0
        continues = running.state is StreamState.INTERRUPTED and not running.is_aborted
        if reason is FinishReason.ABORT and continues and not overdue:
            self._report(running, None, broken=InterruptReason.NEW_WEIGHTS)
        elif running.turn_ended(reason):
            if running.is_aborted:  # it ended its turn just before it was aborted
                self._end(running, FinishReason.ABORT)
            else:
                running.state = StreamState.OUTSIDE
        else:
            self._end(running, reason)

    def _end(self, running: RunningTrajectory, reason: FinishReason) -> None:
        """Report the end of a stream, and forget its trajectory unless it continues elsewhere.

        A cut by seconds counts only if the engine's stream was aborted for it; a cut ends as LENGTH.
        """
        if running.cut is Cap.SECONDS and (reason is not FinishReason.ABORT or not running.length):
            running.cut = None  # it ended by itself
        if running.cut is not None:
            reason = FinishReason.LENGTH
        self._report(running, reason)
        self._remove(running)
        if reason is not FinishReason.ABORT:
            self._forget(running)

    def _remove(self, running: RunningTrajectory) -> None:
        running.state = StreamState.ENDED
        self._store.forget(running.assignment.trajectory_id)
        del self.running[running.assignment.trajectory_id]
        self._left()
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
        """Store the trajectory's unreported tokens in the segment, and add its progress to the next report.

        `reason` is set if the response has finished. The store raises `StoreFullError`.
        """
        now = self._out.clock.now()
        piece = running.unreported(now)
        tokens = None if piece is None else self._store.keep(piece)
        self._out.progress.append(
            running.pop_progress(tokens, reason, now, broken=broken, failure=failure, detail=detail)
        )
