"""Scheduler of an emulated engine: which requests run, and when each ends. Pure; owns batch, queue and time.

`EmulatedEngine` calls it with the current emulated time. Events are the end or admission of a request, a full KV
cache, and calls from outside. One formula gives the steps between two events, so a token costs nothing. A request
that arrives during a step is admitted at its end. A prefill delays the next step. Members of a group under one
version share the prefill of their prompt, but each counts its whole prompt in the cache. A finished request keeps
its cache while there is room (`PrefixCache`), so its next turn prefills only new tokens. The cache holds at most
`kv_capacity` tokens. When it is full the newest request is retracted, so the oldest always makes progress. Events
do not depend on when `advance` is called (`tests/engines/emulated/test_engine.py`).
"""

from collections import deque

import numpy as np

from laminar_py.config.emulation import EngineTimes
from laminar_py.engines.emulated.batch import Batch, EmulatedJob, PrefixCache
from laminar_py.engines.emulated.responses import LOGPROB, PlannedResponse
from laminar_py.records.codec import FloatArray
from laminar_py.records.engine import Delta, EngineStatus, GenerateRequest, PauseMode
from laminar_py.records.trajectory import FinishReason


class EmulatedScheduler:
    """Continuous batching of at most `max_batch` requests in `kv_capacity` tokens of KV cache, from time 0 on."""

    def __init__(self, times: EngineTimes, *, max_batch: int, max_len: int, kv_capacity: int) -> None:
        self._steps, self._prefill_tokens_per_s = times.steps, times.prefill_tokens_per_s
        self._reserve_tokens = times.reserve_tokens
        self._max_batch = max_batch
        self._kv_capacity = kv_capacity
        self._running = Batch(reserve=times.reserve_tokens)
        self._cache = PrefixCache()
        self._continued: deque[EmulatedJob] = deque()  # requests with tokens, admitted before fresh ones
        self._fresh: deque[EmulatedJob] = deque()
        self._newcomers: list[EmulatedJob] = []  # requests before the end of their first step
        self._deltas: list[Delta] = []
        self._logprobs: FloatArray = np.full(max_len, LOGPROB, np.float32)
        self._logprobs.flags.writeable = False  # deltas are views of it
        self._boundary_s = 0.0  # when the current step began, or will begin after a prefill
        self._touched_s = 0.0  # time of the last call from outside
        self._owed_s = 0.0  # rest of a prefill that a pause or load interrupted
        self.num_tokens = 0  # generated so far
        self.busy_s = 0.0  # time of steps so far, and of prefills from their start
        self._num_steps = 0
        self._kv_used = 0
        self._paused = self._loading = False
        self._version = -1
        self._held = True  # paused, loading, or without weights
        self._event: tuple[float, int] | None = None  # the next event, valid if `_is_known`
        self._is_known = False

    # ---- time

    @property
    def next_event_s(self) -> float | None:
        """Emulated time of the next event; None if no event will come."""
        event = self._next_event()
        return None if event is None else event[0]

    def advance(self, now: float) -> None:
        """Process all events and steps up to `now`. A `now` before the last call changes nothing."""
        while (event := self._next_event()) is not None and event[0] <= now:
            self._step(event[1])
            self._settle()
        if self._held:
            return
        if event is None or not self._running.jobs:
            self._begin_at(max(self._boundary_s, now))
        elif now > self._boundary_s:
            past = now - self._boundary_s
            done = self._steps.within(past, running=len(self._running.jobs), kv_used=self._kv_used)
            self._step(min(done, event[1] - 1))  # the event itself is later

    def status(self) -> EngineStatus:
        """The engine's load and version at the last `advance`."""
        waiting = len(self._continued) + len(self._fresh)
        return EngineStatus(
            running=len(self._running.jobs),
            waiting=waiting,
            kv_used=self._kv_used,
            kv_capacity=self._kv_capacity,
            version=self._version,
        )

    def lengths(self) -> dict[str, int]:
        """Response tokens of each running request, by its id, as of the last `advance`."""
        return {job.request.rid: self._length(job) for job in self._running.jobs.values()}

    def take_deltas(self) -> list[Delta]:
        """Remove and return the deltas since the last call, in order."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def flush(self) -> None:
        """Send the unsent tokens of running requests."""
        for job in self._running.jobs.values():
            self._send(job)

    # ---- from outside; each advances to its own moment

    def add_request(self, now: float, request: GenerateRequest, response: PlannedResponse) -> None:
        """Queue a request. Ends it at once if its prefix is as long as the planned response."""
        self._touch(now)
        length = len(request.prefix_ids)
        job = EmulatedJob(request=request, response=response, length=length, sent=length)
        if length >= response.num_tokens:
            self._emit(job, length, response.reason)
            return
        (self._continued if length else self._fresh).append(job)
        self.advance(now)

    def abort(self, now: float, rid: str) -> None:
        """End the request `rid` with ABORT, whether it runs or waits. Ignores an unknown `rid`."""
        self._touch(now)
        job = self._running.jobs.get(rid)
        if job is not None:
            self._end(job, FinishReason.ABORT)
            return
        for queue in (self._continued, self._fresh):
            for waiting in [job for job in queue if job.request.rid == rid]:
                queue.remove(waiting)
                self._emit(waiting, waiting.length, FinishReason.ABORT)

    def pause(self, now: float, mode: PauseMode) -> None:
        """Stop making steps. Sends every token generated so far, then ends or retracts requests by `mode`."""
        self._touch(now)
        self._hold(now, paused=True, loading=self._loading)
        match mode:
            case PauseMode.IN_PLACE:
                self.flush()
            case PauseMode.RETRACT:
                for job in list(reversed(self._running.jobs.values())):
                    self._retract(job)
            case PauseMode.ABORT:
                for job in list(self._running.jobs.values()):
                    self._end(job, FinishReason.ABORT)
                for job in (*self._continued, *self._fresh):
                    self._emit(job, job.length, FinishReason.ABORT)
                self._continued.clear()
                self._fresh.clear()

    def resume(self, now: float) -> None:
        """Make steps again after `pause`."""
        self._hold(now, paused=False, loading=self._loading)

    def begin_load(self, now: float, version: int) -> None:
        """Admit no requests until `end_load`.

        `RuntimeError` while requests run, `ValueError` for an older version.
        """
        self._touch(now)
        if self._running.jobs and not self._paused:
            raise RuntimeError(
                f"version {version} cannot load while {len(self._running.jobs)} requests run; pause first"
            )
        if version < self._version:
            raise ValueError(f"version {version} is older than {self._version}; versions never go back")
        self._hold(now, paused=self._paused, loading=True)

    def end_load(self, now: float, version: int | None) -> None:
        """End a load. Serve `version`, or the previous version after a failed load, with `version=None`."""
        if version is not None:
            self._version = version
            self._cache.clear()
        self._hold(now, paused=self._paused, loading=False)

    # ---- between two steps

    def _hold(self, now: float, *, paused: bool, loading: bool) -> None:
        if not self._held:
            self._owed_s = max(0.0, self._boundary_s - now)
        self._paused, self._loading, self._is_known = paused, loading, False
        self._held = paused or loading or self._version < 0
        if not self._held:
            self._begin_at(now + (self._owed_s if self._running.jobs else 0.0))
            self._owed_s = 0.0
            self._touched_s = now
            self.advance(now)

    def _touch(self, now: float) -> None:
        """Advance to `now`, at which a call from outside changes the state."""
        self.advance(now)
        self._touched_s, self._is_known = now, False

    def _next_event(self) -> tuple[float, int] | None:
        """Time of the next event, and the steps until then; None if no event will come."""
        if not self._is_known:
            self._event, self._is_known = self._find_event(), True
        return self._event

    def _find_event(self) -> tuple[float, int] | None:
        if self._held:
            return None
        if not self._running.jobs:
            return (self._boundary_s, 0) if self._continued or self._fresh else None
        steps = self._steps_to_event()
        return self._boundary_s + self._duration(steps), steps

    def _steps_to_event(self) -> int:
        """Steps of the batch, which is not empty, until the next event."""
        if self._has_room():
            return 0 if self._touched_s <= self._boundary_s else 1
        if self._newcomers:
            return 1
        return min(
            self._running.next_end - self._num_steps,
            (self._kv_capacity - self._kv_used) // len(self._running.jobs),
        )

    def _duration(self, steps: int) -> float:
        return self._steps.seconds(steps, running=len(self._running.jobs), kv_used=self._kv_used)

    def _step(self, steps: int) -> None:
        if not steps:
            return
        num_tokens = steps * len(self._running.jobs)
        self._compute(self._duration(steps))
        self._num_steps += steps
        self._kv_used += num_tokens
        self.num_tokens += num_tokens

    def _compute(self, seconds: float) -> None:
        self._begin_at(self._boundary_s + seconds)
        self.busy_s += seconds

    def _begin_at(self, boundary_s: float) -> None:
        """Set the start of the next step."""
        self._boundary_s, self._is_known = boundary_s, False

    def _settle(self) -> None:
        """Do the work between two steps: send first tokens, end finished requests, retract and admit."""
        for job in self._newcomers:
            if self._running.jobs.get(job.request.rid) is job:
                self._send(job)
        self._newcomers = [job for job in self._newcomers if job.since == self._num_steps]
        while (ended := self._running.ends_at(self._num_steps)) is not None:
            self._end(ended, ended.response.reason)
        while len(self._running.jobs) > 1 and self._kv_used + len(self._running.jobs) > self._kv_capacity:
            self._retract(self._running.youngest)
        self._admit()
        self._is_known = False

    def _admit(self) -> None:
        num_tokens = 0
        while self._has_room():
            job = (self._continued or self._fresh).popleft()
            self._cache.shrink(self._kv_capacity - self._kv_used)
            num_tokens += self._prefill_tokens(job)
            self._running.add(job, step=self._num_steps, version=self._version)
            self._newcomers.append(job)
            self._kv_used += job.context
        self._compute(num_tokens / self._prefill_tokens_per_s)

    def _has_room(self) -> bool:
        """True if the next waiting request can be admitted. A request always fits alone."""
        queue, num_running = self._continued or self._fresh, len(self._running.jobs)
        if not queue or num_running == self._max_batch:
            return False
        if not num_running:
            return True
        growth = max(self._reserve_tokens, num_running + 1)
        reserved = self._running.reserved(self._num_steps)
        return self._kv_used + reserved + queue[0].context + growth <= self._kv_capacity

    def _prefill_tokens(self, job: EmulatedJob) -> int:
        """Tokens that a prefill of `job` computes.

        It leaves out tokens in the request's kept cache, or the prompt if a sibling has it under this version.
        """
        is_there = self._running.has_prompt(job.request.group_id, self._version)
        shared = len(job.request.prompt_ids) if is_there else 0
        return job.context - max(shared, self._cache.remove(job.request.rid))

    # ---- deltas and ends

    def _length(self, job: EmulatedJob) -> int:
        return job.length + self._num_steps - job.since

    def _send(self, job: EmulatedJob, reason: FinishReason | None = None) -> None:
        """Send the unsent tokens of a running request, and its end if there is a `reason`."""
        length = self._length(job)
        if length > job.sent or reason is not None:
            self._emit(job, length, reason)

    def _emit(self, job: EmulatedJob, length: int, reason: FinishReason | None) -> None:
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

    def _end(self, job: EmulatedJob, reason: FinishReason) -> None:
        self._send(job, reason)
        self._leave(job)
        if job.version == self._version:  # else older weights filled its cache
            self._cache.keep(job.request.rid, len(job.request.prompt_ids) + self._length(job))

    def _retract(self, job: EmulatedJob) -> None:
        """Move a request to the front of the queue with its tokens. Its cache is filled again later."""
        self._send(job)
        length = self._length(job)
        self._leave(job)
        job.length = length
        self._continued.appendleft(job)

    def _leave(self, job: EmulatedJob) -> None:
        self._cache.shrink(
            self._kv_capacity - self._kv_used
        )  # shrink to the present room, before the removal frees more
        self._running.remove(job)
        self._kv_used -= len(job.request.prompt_ids) + self._length(job)
