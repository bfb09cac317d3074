"""Scheduler of an emulated engine: which requests run, and when each ends. Pure; owns batch, queue and time.

Called by `EmulatedEngine`, which tells the time. Between two events (a request ends, is admitted, the KV cache is
full, something comes from outside) the steps are one formula, so a token costs nothing. A request that comes in
the middle of a step is admitted at its end. A prefill stands before the next step and holds everything else up;
members of a group that run under one version share that of their prompt, but each counts prompt and tokens in full
in the cache. Invariants: no more than `kv_capacity` tokens are in the cache, the oldest request is never the one
that makes room, and what happens at a time does not depend on when `advance` is called.
"""

from collections import Counter, deque
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from laminar_py.config.emulated_profile import EngineTimes
from laminar_py.engines.emulated.responses import LOGPROB, PlannedResponse
from laminar_py.records.codec import FloatArray
from laminar_py.records.engine import Delta, EngineStatus, GenerateRequest, PauseMode
from laminar_py.records.trajectory import FinishReason


@dataclass(slots=True, eq=False, kw_only=True)
class _Job:
    """A request in the engine, e.g. a new one: `_Job(request=request, response=response, length=0, sent=0)`."""

    request: GenerateRequest
    response: PlannedResponse
    length: int  # response tokens when it last began to wait or to run
    sent: int  # response tokens that left in deltas
    since: int = 0  # steps that the engine had made when it began to run
    stay: int = -1  # number of its admission, -1 while it does not run
    is_young: bool = False  # True while what is reserved for its growth counts
    version: int = -1  # of the weights that filled its cache

    @property
    def context(self) -> int:
        """Tokens that must be in the cache before it runs."""
        return len(self.request.prompt_ids) + self.length

    @property
    def last_step(self) -> int:
        """Steps that the engine will have made when it ends, if it runs on."""
        return self.since + self.response.num_tokens - self.length


class _Reserve:
    """Room for the growth of requests that were admitted within the last `steps`, as far as it is not used."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._young: deque[tuple[int, _Job]] = deque()  # with the number of the admission, the oldest first
        self._since = self._count = 0  # sums over the young that run

    def add(self, job: _Job) -> None:
        """Reserve for one that has just been admitted."""
        job.is_young = True
        self._young.append((job.stay, job))
        self._since, self._count = self._since + job.since, self._count + 1

    def remove(self, job: _Job) -> None:
        """Reserve nothing more for it."""
        if job.is_young:
            job.is_young = False
            self._since, self._count = self._since - job.since, self._count - 1

    def tokens(self, num_steps: int) -> int:
        """Tokens that are reserved after so many steps of the engine."""
        begun = num_steps - self._steps
        while self._young and (self._young[0][0] != self._young[0][1].stay or self._young[0][1].since <= begun):
            stay, job = self._young.popleft()
            if job.stay == stay:
                self.remove(job)
        return self._since - self._count * begun


class EmulatedScheduler:
    """Continuous batching of at most `max_batch` requests in `kv_capacity` tokens of KV cache, from time 0 on."""

    def __init__(self, times: EngineTimes, *, max_batch: int, max_len: int, kv_capacity: int) -> None:
        self._times = times
        self._max_batch = max_batch
        self._kv_capacity = kv_capacity
        self._running: dict[str, _Job] = {}  # the oldest admission first
        self._continued: deque[_Job] = deque()  # have tokens already; before the fresh ones
        self._fresh: deque[_Job] = deque()
        self._newcomers: list[_Job] = []  # have not made their first step
        self._ends: list[tuple[int, int, _Job]] = []  # heap: last step, number of the admission; some have left
        self._num_admitted = 0
        self._reserve = _Reserve(times.reserve_tokens)
        self._cached: Counter[tuple[str, int]] = Counter()  # running jobs by group and version
        self._deltas: list[Delta] = []
        self._logprobs: FloatArray = np.full(max_len, LOGPROB, np.float32)
        self._logprobs.flags.writeable = False  # deltas are views of it
        self._boundary_s = 0.0  # when the present step began or, after a prefill, will begin
        self._touched_s = 0.0  # when something last came from outside
        self._owed_s = 0.0  # prefill that a hold interrupted
        self.num_tokens = 0  # generated so far
        self._num_steps = 0
        self._kv_used = 0
        self._paused = self._loading = False
        self._version = -1

    # ---- time

    @property
    def next_event_s(self) -> float | None:
        """Emulated time of the next event; None while there is none to come."""
        if self._held:
            return None
        if not self._running:
            return self._boundary_s if self._head else None
        return self._boundary_s + self._duration(self._steps_to_event())

    def advance(self, now: float) -> None:
        """Let everything happen up to `now`; an earlier `now` than before changes nothing."""
        while (due := self.next_event_s) is not None and due <= now:
            if self._running:
                self._step(self._steps_to_event())
            self._settle()
        if self._held:
            return
        if not self._running:
            self._boundary_s = max(self._boundary_s, now)
        elif now > self._boundary_s:
            past = now - self._boundary_s
            done = self._times.steps_within(past, running=len(self._running), kv_used=self._kv_used)
            self._step(min(done, self._steps_to_event() - 1))  # the event itself is ahead

    def status(self) -> EngineStatus:
        """State as of the last `advance`."""
        waiting = len(self._continued) + len(self._fresh)
        return EngineStatus(
            running=len(self._running),
            waiting=waiting,
            kv_used=self._kv_used,
            kv_capacity=self._kv_capacity,
            version=self._version,
        )

    def lengths(self) -> dict[str, int]:
        """Response tokens of each running request, by its id, as of the last `advance`."""
        return {rid: self._length(job) for rid, job in self._running.items()}

    def take_deltas(self) -> list[Delta]:
        """Deltas since the last call, in order."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def flush(self) -> None:
        """Send what running requests have."""
        for job in self._running.values():
            self._send(job)

    # ---- from outside; each advances to its own moment

    def submit(self, now: float, request: GenerateRequest, response: PlannedResponse) -> None:
        """Queue a request; one whose prefix is as long as its response may be has ended."""
        self._touch(now)
        length = len(request.prefix_ids)
        job = _Job(request=request, response=response, length=length, sent=length)
        if length >= response.num_tokens:
            self._emit(job, length, response.reason)
            return
        (self._continued if length else self._fresh).append(job)
        self.advance(now)

    def abort(self, now: float, rid: str) -> None:
        """End a request wherever it is, if it is here."""
        self._touch(now)
        job = self._running.get(rid)
        if job is not None:
            self._end(job, FinishReason.ABORT)
        for queue in (self._continued, self._fresh):
            for waiting in [job for job in queue if job.request.rid == rid]:
                queue.remove(waiting)
                self._emit(waiting, waiting.length, FinishReason.ABORT)

    def pause(self, now: float, mode: PauseMode) -> None:
        """Make no more steps; every token generated so far leaves."""
        self._touch(now)
        self._hold(now, paused=True, loading=self._loading)
        match mode:
            case PauseMode.IN_PLACE:
                self.flush()
            case PauseMode.RETRACT:
                for job in reversed(list(self._running.values())):
                    self._retract(job)
            case PauseMode.ABORT:
                for job in list(self._running.values()):
                    self._end(job, FinishReason.ABORT)
                for job in (*self._continued, *self._fresh):
                    self._emit(job, job.length, FinishReason.ABORT)
                self._continued.clear()
                self._fresh.clear()

    def resume(self, now: float) -> None:
        """Make steps again."""
        self._hold(now, paused=False, loading=self._loading)

    def begin_load(self, now: float, version: int) -> None:
        """Admit nothing more until `end_load`. `RuntimeError` while requests run, `ValueError` if it goes back."""
        self._touch(now)
        if self._running and not self._paused:
            raise RuntimeError(
                f"version {version} cannot load while {len(self._running)} requests run; pause first"
            )
        if version < self._version:
            raise ValueError(f"version {version} is older than {self._version}; versions never go back")
        self._hold(now, paused=self._paused, loading=True)

    def end_load(self, now: float, version: int | None) -> None:
        """Go on as `version`, None for that of before."""
        if version is not None:
            self._version = version
        self._hold(now, paused=self._paused, loading=False)

    # ---- between two steps

    @property
    def _held(self) -> bool:
        return self._paused or self._loading or self._version < 0

    def _hold(self, now: float, *, paused: bool, loading: bool) -> None:
        if not self._held:
            self._owed_s = max(0.0, self._boundary_s - now)
        self._paused, self._loading = paused, loading
        if not self._held:
            self._boundary_s = now + (self._owed_s if self._running else 0.0)
            self._owed_s = 0.0
            self._touched_s = now
            self.advance(now)

    def _touch(self, now: float) -> None:
        self.advance(now)
        self._touched_s = now

    def _steps_to_event(self) -> int:
        """Steps that the batch makes before anything else may happen; it is not empty."""
        if self._has_room():
            return 0 if self._touched_s <= self._boundary_s else 1
        if self._newcomers:
            return 1
        return min(self._next_end - self._num_steps, (self._kv_capacity - self._kv_used) // len(self._running))

    @property
    def _next_end(self) -> int:
        """Last step of the running request that ends first."""
        while self._ends[0][1] != self._ends[0][2].stay:
            heappop(self._ends)
        return self._ends[0][0]

    def _duration(self, steps: int) -> float:
        return self._times.steps_s(steps, running=len(self._running), kv_used=self._kv_used)

    def _step(self, steps: int) -> None:
        self._boundary_s += self._duration(steps)
        self._num_steps += steps
        self._kv_used += steps * len(self._running)
        self.num_tokens += steps * len(self._running)

    def _settle(self) -> None:
        """Do what is due between two steps; a request's first token is sent at once."""
        for job in self._newcomers:
            if self._running.get(job.request.rid) is job:
                self._send(job)
        self._newcomers = [job for job in self._newcomers if job.since == self._num_steps]
        while self._running and self._next_end == self._num_steps:
            job = heappop(self._ends)[2]
            self._end(job, job.response.reason)
        while len(self._running) > 1 and self._kv_used + len(self._running) > self._kv_capacity:
            self._retract(next(reversed(self._running.values())))
        self._admit()

    def _admit(self) -> None:
        num_tokens = 0
        while self._has_room():
            job = (self._continued or self._fresh).popleft()
            num_tokens += self._prefill_tokens(job)
            self._num_admitted += 1
            job.since, job.version, job.stay = self._num_steps, self._version, self._num_admitted
            self._running[job.request.rid] = job
            self._newcomers.append(job)
            heappush(self._ends, (job.last_step, job.stay, job))
            self._reserve.add(job)
            self._cached[job.request.group_id, job.version] += 1
            self._kv_used += job.context
        self._boundary_s += num_tokens / self._times.prefill_tokens_per_s

    @property
    def _head(self) -> _Job | None:
        queue = self._continued or self._fresh
        return queue[0] if queue else None

    def _has_room(self) -> bool:
        """True where the next waiting request may run; a request that is alone always fits."""
        job = self._head
        if job is None or len(self._running) == self._max_batch:
            return False
        if not self._running:
            return True
        growth = max(self._times.reserve_tokens, len(self._running) + 1)
        reserved = self._reserve.tokens(self._num_steps)
        return self._kv_used + reserved + job.context + growth <= self._kv_capacity

    def _prefill_tokens(self, job: _Job) -> int:
        """Without its prompt, if that is in the cache of a sibling by the present weights."""
        return job.length if (job.request.group_id, self._version) in self._cached else job.context

    # ---- what leaves

    def _length(self, job: _Job) -> int:
        return job.length + self._num_steps - job.since

    def _send(self, job: _Job, reason: FinishReason | None = None) -> None:
        """The tokens of a running request that have not left yet."""
        length = self._length(job)
        if length > job.sent or reason is not None:
            self._emit(job, length, reason)

    def _emit(self, job: _Job, length: int, reason: FinishReason | None) -> None:
        ids = job.response.ids(job.sent, length)
        old_kv = job.version if job.sent < length and job.version < self._version else None
        job.sent = length
        self._deltas.append(
            Delta(
                rid=job.request.rid,
                ids=ids,
                logprobs=self._logprobs[: len(ids)],
                version=self._version,
                finish_reason=reason,
                kv_version=old_kv,
            )
        )

    def _end(self, job: _Job, reason: FinishReason) -> None:
        self._send(job, reason)
        self._leave(job)

    def _retract(self, job: _Job) -> None:
        """Back to the front of the queue with its tokens; its cache is filled again later."""
        self._send(job)
        length = self._length(job)
        self._leave(job)
        job.length = length
        self._continued.appendleft(job)

    def _leave(self, job: _Job) -> None:
        del self._running[job.request.rid]
        self._reserve.remove(job)
        job.stay, prompt = -1, (job.request.group_id, job.version)
        self._cached[prompt] -= 1
        if not self._cached[prompt]:
            del self._cached[prompt]
        self._kv_used -= len(job.request.prompt_ids) + self._length(job)
