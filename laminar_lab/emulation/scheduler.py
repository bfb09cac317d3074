"""Scheduler of an emulated engine: which requests run, and when each ends. Pure; owns batch, queue and time.

`EmulatedEngine` calls it with the current emulated time. Events are the end or admission of a request, a full KV
cache, and calls from outside. One formula gives the steps between two events, so a token costs nothing. A request
that arrives during a step is admitted at its end. A prefill delays the next step. Members of a group under one
version share the prefill of their prompt, but each counts its whole prompt in the cache. A finished request keeps
its cache while there is room (`PrefixCache`), so its next turn prefills only new tokens. The cache holds at most
`kv_capacity` tokens. When it is full the newest request is retracted, so the oldest always makes progress. Events
do not depend on when `advance` is called (`tests/emulation/test_engine.py`).
"""

from collections import Counter, deque
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from laminar_lab.emulation.responses import LOGPROB, PlannedResponse, Responses
from laminar_lab.emulation.settings import EngineTimes
from laminar_py.engines import EngineJob, RequestScheduler
from laminar_py.records import FinishReason
from laminar_py.records.codec import FloatArray
from laminar_py.records.engine import GenerateRequest, PauseMode


@dataclass(slots=True, eq=False, kw_only=True)
class EmulatedJob(EngineJob):
    """A request in the engine; a new request has `length=0, sent=0`."""

    response: PlannedResponse
    length: int  # response tokens at the last start of its wait or run
    sent: int  # response tokens sent in deltas
    continues: bool  # it waits before fresh requests
    since: int = 0  # engine steps before its admission
    stay: int = -1  # number of its admission, -1 while it waits
    is_young: bool = False  # True while its growth reserve counts
    was_cached: bool = False  # a pause dropped its cache

    @property
    def context(self) -> int:
        """Tokens that must be in the cache before the request runs."""
        return len(self.request.prompt_ids) + self.length

    @property
    def last_step(self) -> int:
        """Engine steps at its end, if nothing interrupts the request."""
        return self.since + self.response.num_tokens - self.length


class Batch:
    """The running requests, e.g. `Batch({}, reserve=600)`, which reserves 600 tokens for growth of a new request.

    The scheduler asks at every event, so no method walks over all requests. Heap and queue remove an ended request
    only when its entry reaches the front. The admission number of the entry then differs from the job's, which
    shows that the entry is old.
    """

    def __init__(self, jobs: dict[int, EmulatedJob], *, reserve: int) -> None:
        self._steps = reserve
        self._jobs = jobs  # by ticket, the oldest admission first; changed here alone
        self._ends: list[tuple[int, int, EmulatedJob]] = []  # heap: last step, number of the admission
        self._young: deque[tuple[int, EmulatedJob]] = deque()  # admitted within `reserve` steps, oldest first
        self._young_since = self._num_young = 0  # of running young requests: sum of `since`, and count
        self._prompts: Counter[tuple[str, int]] = Counter()  # requests by group and version
        self._num_admitted = 0

    def add(self, job: EmulatedJob, *, step: int, version: int) -> None:
        """Add a request, admitted after `step` engine steps under the weights of `version`."""
        self._num_admitted += 1
        job.since, job.version, job.stay, job.is_young = step, version, self._num_admitted, True
        self._jobs[job.ticket] = job
        heappush(self._ends, (job.last_step, job.stay, job))
        self._young.append((job.stay, job))
        self._young_since, self._num_young = self._young_since + step, self._num_young + 1
        self._prompts[job.request.group_id, version] += 1

    def remove(self, job: EmulatedJob) -> None:
        """Remove a request that ended or was retracted."""
        del self._jobs[job.ticket]
        self._release(job)
        job.stay, prompt = -1, (job.request.group_id, job.version)
        self._prompts[prompt] -= 1
        if not self._prompts[prompt]:
            del self._prompts[prompt]
        if not self._jobs:
            self._ends.clear()
            self._young.clear()

    @property
    def next_end(self) -> int:
        """Last step of the request that ends first. The batch must not be empty."""
        ends = self._ends
        while ends[0][1] != ends[0][2].stay:
            heappop(ends)
        return ends[0][0]

    def ends_at(self, step: int) -> EmulatedJob | None:
        """A request that ends with `step`, the oldest admission of several; None if no request ends."""
        return self._ends[0][2] if self._jobs and self.next_end == step else None

    def reserved(self, step: int) -> int:
        """Tokens of the growth reserve that young requests have not used after `step` engine steps."""
        begun = step - self._steps
        while self._young and (self._young[0][0] != self._young[0][1].stay or self._young[0][1].since <= begun):
            stay, job = self._young.popleft()
            if job.stay == stay:
                self._release(job)
        return self._young_since - self._num_young * begun

    def has_prompt(self, group_id: str, version: int) -> bool:
        """True if a running member of the group has its prompt in the cache by the weights of `version`."""
        return (group_id, version) in self._prompts

    def _release(self, job: EmulatedJob) -> None:
        if job.is_young:
            job.is_young = False
            self._young_since, self._num_young = self._young_since - job.since, self._num_young - 1


class PrefixCache:
    """Cached tokens of finished requests by id, until the room is needed.

    Like a radix cache, it uses the room that running requests leave, and evicts the least recently used prefix.
    The scheduler clears it on new weights.
    """

    def __init__(self) -> None:
        self._kept: dict[str, int] = {}  # by id, the least recently used first; each counts its whole prompt
        self._num_tokens = 0

    def keep(self, rid: str, num_tokens: int) -> None:
        """Keep the cache of a request that ended with `num_tokens` tokens."""
        self.remove(rid)
        self._kept[rid] = num_tokens
        self._num_tokens += num_tokens

    def remove(self, rid: str) -> int:
        """Remove the cache of a request and return its tokens; 0 if there is none."""
        num_tokens = self._kept.pop(rid, 0)
        self._num_tokens -= num_tokens
        return num_tokens

    def shrink(self, room: int) -> None:
        """Evict until at most `room` tokens are left."""
        while self._num_tokens > room:
            self.remove(next(iter(self._kept)))

    def clear(self) -> None:
        """Drop all caches, since new weights are loaded."""
        self._kept.clear()
        self._num_tokens = 0


class EmulatedScheduler(RequestScheduler[EmulatedJob]):
    """Continuous batching of at most `max_batch` requests in `kv_capacity` tokens of KV cache, from time 0 on.

    Before a call that changes requests, pauses or weights, the caller calls `begin_call` with its time.
    """

    def __init__(
        self, times: EngineTimes, responses: Responses, *, max_batch: int, max_len: int, kv_capacity: int
    ) -> None:
        super().__init__(max_len=max_len, kv_capacity=kv_capacity)
        self._times, self._responses = times, responses
        self._max_batch = max_batch
        self._batch = Batch(self._running, reserve=times.reserve_tokens)
        self._cache = PrefixCache()
        self._newcomers: list[EmulatedJob] = []  # before the end of their first step, or of one after a pause
        self._logprobs: FloatArray = np.full(max_len, LOGPROB, np.float32)
        self._logprobs.flags.writeable = False  # deltas are views of it
        self._boundary_s = 0.0  # when the current step began, or will begin after a prefill
        self._called_s = 0.0  # time of the last call from outside
        self._owed_s = 0.0  # rest of a prefill that a pause or load interrupted
        self.num_tokens = 0  # generated so far
        self.busy_s = 0.0  # time of steps so far, and of prefills from their start
        self.recomputed_s = 0.0  # of these, prefills of caches that a pause dropped
        self._num_steps = 0
        self._kv_used = 0
        self._loading = False
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
            self._work_between_steps()
        if self._held:
            return
        if event is None or not self._running:
            self._begin_at(max(self._boundary_s, now))
        elif now > self._boundary_s:
            past = now - self._boundary_s
            done = self._times.steps_within(past, running=len(self._running), kv_used=self._kv_used)
            self._step(min(done, event[1] - 1))  # the event itself is later

    @property
    def kv_used(self) -> int:
        """Tokens in the KV cache of running requests, as of the last `advance`."""
        return self._kv_used

    def lengths(self) -> dict[str, int]:
        """Response tokens of each running request, by its id, as of the last `advance`."""
        return {job.request.rid: self._length(job) for job in self._running.values()}

    def flush(self) -> None:
        """Send the unsent tokens of running requests."""
        for job in self._running.values():
            self._send(job)

    # ---- from outside

    def begin_call(self, now: float) -> None:
        """Advance to `now`, at which a call from outside changes the state."""
        self.advance(now)
        self._called_s, self._is_known = now, False

    def pause(self, mode: PauseMode) -> None:
        """See `RequestScheduler.pause`. RELEASE drops all caches, also caches of finished requests."""
        self._hold(paused=True, loading=self._loading)
        if mode in (PauseMode.RETRACT, PauseMode.RELEASE):
            for job in self._running.values():
                job.was_cached = True
        super().pause(mode)
        if mode is PauseMode.RELEASE:
            self._cache.clear()

    def resume(self) -> None:
        """See `RequestScheduler.resume`. Each running request sends its next token at once."""
        if self._paused:
            self._newcomers = list(self._running.values())
        self._hold(paused=False, loading=self._loading)

    def begin_load(self, version: int) -> None:
        """Admit no requests until `end_load`. Raises the errors of `check_load`."""
        self.check_load(version)
        self._hold(paused=self._paused, loading=True)

    def end_load(self, version: int | None) -> None:
        """End a load. Serve `version`, or the previous version after a failed load, with `version=None`."""
        if version is not None:
            self._version = version
            self._cache.clear()
        self._hold(paused=self._paused, loading=False)

    def _queue(self, job: EmulatedJob) -> None:
        self._insert(job)
        self.advance(self._called_s)

    def _insert(self, job: EmulatedJob) -> None:
        """Queue a fresh request at the end, and a continued request before the first fresh one."""
        if not job.continues:
            self._waiting.append(job)
            return
        places = (place for place, other in enumerate(self._waiting) if not other.continues)
        self._waiting.insert(next(places, len(self._waiting)), job)

    # ---- between two steps

    def _hold(self, *, paused: bool, loading: bool) -> None:
        """Set the reasons to hold all requests, and hold or resume them.

        A paused step is completed after the hold: it takes the rest of its time from then on.
        """
        now = self._called_s
        if not self._held:
            self._owed_s = max(0.0, self._boundary_s - now)
        self._paused, self._loading, self._is_known = paused, loading, False
        self._held = paused or loading or self._version < 0
        if not self._held:
            self._begin_at(now + (self._owed_s if self._running else 0.0))
            self._owed_s = 0.0
            self.advance(now)

    def _next_event(self) -> tuple[float, int] | None:
        """Time of the next event, and the steps until then; None if no event will come."""
        if not self._is_known:
            self._event, self._is_known = self._find_event(), True
        return self._event

    def _find_event(self) -> tuple[float, int] | None:
        if self._held:
            return None
        if not self._running:
            return (self._boundary_s, 0) if self._waiting else None
        steps = self._steps_to_event()
        return self._boundary_s + self._duration(steps), steps

    def _steps_to_event(self) -> int:
        """Steps of the batch, which is not empty, until the next event."""
        if self._has_room():
            return 0 if self._called_s <= self._boundary_s else 1
        if self._newcomers:
            return 1
        return min(
            self._batch.next_end - self._num_steps, (self._kv_capacity - self._kv_used) // len(self._running)
        )

    def _duration(self, steps: int) -> float:
        return self._times.seconds(steps, running=len(self._running), kv_used=self._kv_used)

    def _step(self, steps: int) -> None:
        if not steps:
            return
        num_tokens = steps * len(self._running)
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

    def _work_between_steps(self) -> None:
        """Do the work between two steps: send first tokens, end finished requests, retract and admit."""
        newcomers = [job for job in self._newcomers if self._running.get(job.ticket) is job]
        self._newcomers = [job for job in newcomers if self._length(job) == job.sent]  # without a step yet
        for job in newcomers:
            self._send(job)
        while (ended := self._batch.ends_at(self._num_steps)) is not None:
            self._end(ended, ended.response.reason)
        while len(self._running) > 1 and self._kv_used + len(self._running) > self._kv_capacity:
            self._retract(next(reversed(self._running.values())))
        self._admit()
        self._is_known = False

    def _admit(self) -> None:
        """Start as many waiting requests as slots and cache allow, and compute their prefills at once."""
        num_tokens = num_recomputed = 0
        while self._has_room():
            job = self._waiting.popleft()
            self._cache.shrink(self._kv_capacity - self._kv_used)
            prefilled = self._prefill_tokens(job)
            num_tokens += prefilled
            num_recomputed += prefilled * job.was_cached
            job.was_cached = False
            self._batch.add(job, step=self._num_steps, version=self._version)
            self._newcomers.append(job)
            self._kv_used += job.context
        self._compute(num_tokens / self._times.prefill_tokens_per_s)
        self.recomputed_s += num_recomputed / self._times.prefill_tokens_per_s

    def _has_room(self) -> bool:
        """True if the next waiting request can be admitted. A request always fits alone."""
        num_running = len(self._running)
        if not self._waiting or num_running == self._max_batch:
            return False
        if not num_running:
            return True
        growth = max(self._times.reserve_tokens, num_running + 1)
        reserved = self._batch.reserved(self._num_steps)
        return self._kv_used + reserved + self._waiting[0].context + growth <= self._kv_capacity

    def _prefill_tokens(self, job: EmulatedJob) -> int:
        """Tokens that a prefill of `job` computes.

        It leaves out tokens in the request's kept cache, or the prompt if a sibling has it under this version.
        """
        is_there = self._batch.has_prompt(job.request.group_id, self._version)
        shared = len(job.request.prompt_ids) if is_there else 0
        return job.context - max(shared, self._cache.remove(job.request.rid))

    # ---- deltas and ends

    def _make_job(self, ticket: int, request: GenerateRequest) -> EmulatedJob:
        """Make the job of a request; it continues where the request has tokens already."""
        length = len(request.prefix_ids)
        return EmulatedJob(
            ticket=ticket,
            request=request,
            response=self._responses.respond(request),
            length=length,
            sent=length,
            continues=length > 0,
        )

    def _length(self, job: EmulatedJob) -> int:
        return job.length + self._num_steps - job.since

    def _send(self, job: EmulatedJob, finish_reason: FinishReason | None = None) -> None:
        length = self._length(job)
        if length > job.sent or finish_reason is not None:
            ids = job.response.ids(job.sent, length)
            job.sent = length
            self._add_delta(job, ids, self._logprobs[: len(ids)], finish_reason)

    def _end(self, job: EmulatedJob, finish_reason: FinishReason) -> None:
        self._send(job, finish_reason)
        self._leave(job)
        if job.version == self._version:  # else older weights filled its cache
            self._cache.keep(job.request.rid, len(job.request.prompt_ids) + self._length(job))

    def _retract(self, job: EmulatedJob) -> None:
        self._send(job)
        length = self._length(job)
        self._leave(job)
        job.length, job.continues = length, True  # its cache is filled again later
        self._waiting.appendleft(job)

    def _leave(self, job: EmulatedJob) -> None:
        # shrink to the present room, before the removal frees more
        self._cache.shrink(self._kv_capacity - self._kv_used)
        self._batch.remove(job)
        self._kv_used -= len(job.request.prompt_ids) + self._length(job)
