"""Scheduler of requests: admission, prefill, retraction and the end of each. Owns the slots and the waiting queue.

Called by the engine's thread alone. A step makes one batch of prefill and adds one token to every decoding
slot; what leaves is collected as deltas. Invariant: the slots never hold more than
`kv_capacity` tokens, and the oldest of them is never the one that makes room.

A job can lend another job the KV cache of their prompt. A lender's cache begins with exactly the tokens that the
other needs, all computed by the present weights, or will when its prefill is done.
"""

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from laminar_py.engines.local.attention import plan_decode
from laminar_py.engines.local.kv import BLOCK, BlockPool, Indices
from laminar_py.engines.local.model import LocalModel
from laminar_py.engines.local.prefill import Prefill, PrefillQueue
from laminar_py.engines.local.sampling import uniforms
from laminar_py.engines.local.slots import Rows, Slots, State
from laminar_py.engines.local.spec import ModelSpec
from laminar_py.engines.requests import response_limit
from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.engine import Delta, EngineLostError, EngineStatus, GenerateRequest, PauseMode
from laminar_py.records.pieces import Recording, RoutedExperts, SamplingMask, join_experts
from laminar_py.records.trajectory import FinishReason


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """A request in the engine, e.g. one that waits: `Job(ticket=7, request=request, response=prefix_ids)`."""

    ticket: int  # the stream that its deltas go to
    request: GenerateRequest
    response: IntArray  # [L] what it had when it last joined the waiting queue
    experts: RoutedExperts | None = None  # recorded before that, from `request.routed` on
    version: int = -1  # the oldest weights in its KV cache, once that is complete
    prefill: Prefill | None = None

    @property
    def cached_ids(self) -> IntArray:
        """Tokens that must be in the cache before it decodes: all but the last."""
        return np.concatenate([self.request.prompt_ids, self.response])[:-1]

    def begins_as(self, other: "Job", version: int) -> bool:
        """True where the cache has what `other`, without a response yet, needs of the weights of `version`."""
        if self.prefill is None:
            usable = self.version == version
        else:
            usable = self.prefill.made_by(version) and not len(self.response)
        return usable and np.array_equal(self.request.prompt_ids, other.request.prompt_ids)


class Siblings:
    """Jobs that have slots, by group."""

    def __init__(self) -> None:
        self._groups: defaultdict[str, dict[int, Job]] = defaultdict(dict)

    def join(self, slot: int, job: Job) -> None:
        """Note that `job` is in `slot`."""
        self._groups[job.request.group_id][slot] = job

    def leave(self, slot: int, job: Job) -> None:
        """Note that `job` has left `slot`."""
        members = self._groups[job.request.group_id]
        del members[slot]
        if not members:
            del self._groups[job.request.group_id]

    def lender(self, job: Job, *, version: int) -> tuple[int, Job] | None:
        """Slot and job whose cache begins, or will, with what `job` needs under `version`."""
        if len(job.response):
            return None
        members = self._groups.get(job.request.group_id, {})
        return next(((slot, other) for slot, other in members.items() if other.begins_as(job, version)), None)


ADMISSION_HEADROOM = 16  # steps that everything running can grow by after an admission, against thrashing

_NO_IDS = np.zeros(0, np.int32)
_NO_LOGPROBS = np.zeros(0, np.float32)


class Scheduler:
    """Continuous batching over `num_slots` slots and `kv_capacity` tokens of KV cache."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_slots: int,
        max_len: int,
        kv_capacity: int,
        stream_interval: int,
        record: tuple[Recording, ...] = (),
        router_noise: torch.Tensor | None = None,
        device: torch.device,
    ) -> None:
        """`router_noise` as in `LocalEngine`."""
        self._spec, self._device = spec, device
        self._max_len, self._kv_capacity, self._stream_interval = max_len, kv_capacity, stream_interval
        self._records_masks = Recording.SAMPLING_MASK in record
        self._model = LocalModel(spec, max_len=max_len, router_noise=router_noise, device=device)
        self._pool = BlockPool(
            spec,
            num_slots=num_slots,
            max_len=max_len,
            kv_capacity=kv_capacity,
            records_experts=Recording.ROUTED_EXPERTS in record,
            device=device,
        )
        self._slots = Slots(num_slots, max_len=max_len)
        # A heap: the lowest comes first, so that an engine which is empty again is like a fresh one, bit by bit.
        self._free = list(range(num_slots))
        self._running: dict[int, Job] = {}  # by slot, the oldest admission first
        self._siblings = Siblings()
        self._waiting: deque[Job] = deque()
        self._prefills = PrefillQueue(self._model, self._pool, max_len=max_len, device=device)
        self._rows: Rows | None = None  # None: the decoding slots have changed
        self._deltas: list[tuple[int, Delta]] = []
        self._paused = False
        self._version = -1

    @property
    def runnable(self) -> bool:
        """True where a step would do anything."""
        return self._version >= 0 and not self._paused and bool(self._running or self._waiting)

    def status(self) -> EngineStatus:
        """May be called from any thread."""
        return EngineStatus(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used=self._slots.kv_used,
            kv_capacity=self._kv_capacity,
            version=self._version,
        )

    def take_deltas(self) -> list[tuple[int, Delta]]:
        """Deltas since the last call, by ticket, in order."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def submit(self, ticket: int, request: GenerateRequest) -> None:
        """Queue a request that fits `max_len`."""
        if len(request.prefix_ids) >= response_limit(request, max_len=self._max_len):
            self._send_nothing(
                Job(ticket=ticket, request=request, response=request.prefix_ids), FinishReason.LENGTH
            )
        else:
            self._waiting.append(Job(ticket=ticket, request=request, response=request.prefix_ids))

    def abort(self, ticket: int) -> None:
        """End a request wherever it is; one that has ended already is left alone."""
        for slot, job in self._running.items():
            if job.ticket == ticket:
                return self._end(slot, FinishReason.ABORT)
        for job in self._waiting:
            if job.ticket == ticket:
                self._waiting.remove(job)
                return self._send_nothing(job, FinishReason.ABORT)
        return None

    def pause(self, mode: PauseMode) -> None:
        """Make no more steps; every token generated so far leaves."""
        self._paused = True
        for slot in reversed(list(self._running)):
            match mode:
                case PauseMode.ABORT:
                    self._end(slot, FinishReason.ABORT)
                case PauseMode.RETRACT:
                    self._retract(slot)
                case PauseMode.IN_PLACE:
                    self._send(slot)
        while mode is PauseMode.ABORT and self._waiting:
            self._send_nothing(self._waiting.popleft(), FinishReason.ABORT)

    def resume(self) -> None:
        """Make steps again."""
        self._paused = False

    def load_weights(self, folder: Path, version: int) -> None:
        """Serve `folder` as `version`. Raises as `InferenceEngine.load_weights` does."""
        if self._running and not self._paused:
            raise RuntimeError(
                f"version {version} cannot load while {len(self._running)} requests run; pause first"
            )
        if version < self._version:
            raise ValueError(f"version {version} is older than {self._version}; versions never go back")
        self._model.load(folder)
        self._version = version
        self._pool.keep_none()  # no turn goes on over what older weights have computed
        if not self._running:
            self._pool.forget()

    def checksum(self) -> str:
        """See `Weights.checksum`; "unloaded" before the first load."""
        return self._model.checksum()

    def step(self) -> None:
        """Add one token to everything that decodes, after a bounded amount of prefill."""
        self._make_room()
        self._admit()
        self._prefill()
        rows = self._rows = self._rows or self._slots.decoding(self._device)
        positions = self._slots.num_prompt[rows.slots] + self._slots.num_response[rows.slots] - 1
        self._reserve(rows.slots, positions)
        if rows.slots.size:
            ids, logprobs, mask = self._decode(rows, positions)
            self._slots.append(rows.slots, ids, logprobs, mask)
            self._dispatch(rows, ids)

    def _make_room(self) -> None:
        while self._slots.kv_used + len(self._running) > self._kv_capacity:
            self._retract(next(reversed(self._running)))

    def _admit(self) -> None:
        while self._waiting and self._free and self._has_room(self._waiting[0]):
            job, slot = self._waiting.popleft(), heapq.heappop(self._free)
            self._slots.occupy(slot, job.request, response=job.response)
            self._fill_cache(slot, job)
            self._running[slot] = job
            self._siblings.join(slot, job)

    def _has_room(self, job: Job) -> bool:
        """A sequence that is alone always fits, because `kv_capacity` is at least `max_len`."""
        growth = ADMISSION_HEADROOM * (len(self._running) + 1)
        needed = len(job.request.prompt_ids) + len(job.response) + growth
        return not self._running or self._slots.kv_used + needed <= self._kv_capacity

    def _fill_cache(self, slot: int, job: Job) -> None:
        """Take what its last turn has left, copy the prompt's KV from a sibling, or join or begin a prefill."""
        ids = job.cached_ids
        num_kept = self._pool.restore(slot, job.request.rid, ids)
        lender = self._siblings.lender(job, version=self._version)
        if num_kept == len(ids):
            self._start(slot, job, version=self._version)
        elif num_kept or lender is None:
            job.prefill = self._prefills.add(slot, ids, done=num_kept, version=self._version)
        elif (prefill := lender[1].prefill) is not None:
            prefill.slots.append(slot)
            job.prefill = prefill
        else:
            source, sibling = lender
            self._pool.share(source, slot, len(ids))
            self._start(slot, job, version=sibling.version)

    def _prefill(self) -> None:
        for prefill in self._prefills.run(self._version):
            for slot in prefill.slots:
                self._start(slot, self._running[slot], version=prefill.version)

    def _start(self, slot: int, job: Job, *, version: int) -> None:
        """Let `job` decode: all but its last token are in the cache, the oldest of them by `version`."""
        job.prefill, job.version = None, version
        self._slots.state[slot] = State.DECODING
        self._rows = None

    def _reserve(self, slots: Indices, positions: Indices) -> None:
        """A place in the cache for one token of each of `slots [B]`, at `positions [B]`."""
        for index in np.flatnonzero(positions % BLOCK == 0).tolist():
            self._pool.extend(int(slots[index]), int(positions[index]) + 1)
        self._pool.settle()

    def _decode(self, rows: Rows, positions: Indices) -> tuple[IntArray, FloatArray, SamplingMask | None]:
        """The next token of each row and its log-probability, `[B]`, and its sampling mask, if recorded."""
        num_response = self._slots.num_response[rows.slots]
        plan = plan_decode(self._pool, slots=rows.slots, positions=positions, num_heads=self._spec.num_heads)
        last_ids = self._tensor(self._slots.last_ids[rows.slots])
        logits, experts = self._model.decode(last_ids, self._tensor(positions), plan=plan)
        if experts is not None:
            self._pool.record(plan.write_blocks, plan.write_offsets, experts)
        uniform = torch.from_numpy(uniforms(rows.seeds, num_response)).to(self._device)
        drawn = rows.sampler.draw(logits, uniform, recorded=self._records_masks)
        values = drawn.logprobs.cpu().numpy()
        if not np.isfinite(values).all():
            raise EngineLostError(f"version {self._version} gives logits that are not finite; go back before it")
        return drawn.ids.cpu().numpy(), values, drawn.mask

    def _dispatch(self, rows: Rows, ids: IntArray) -> None:
        """Send what is due after a step and end what has ended."""
        slots = rows.slots
        num_response = self._slots.num_response[slots]
        stopped = (ids[:, None] == rows.stop_ids).any(1)
        ended = stopped | (num_response >= rows.limits)
        due = self._slots.one_by_one[slots] | (num_response - self._slots.num_sent[slots] >= self._stream_interval)
        for slot in slots[due & ~ended].tolist():
            self._send(slot)
        for slot, is_stop in zip(slots[ended].tolist(), stopped[ended].tolist(), strict=True):
            self._end(slot, FinishReason.STOP if is_stop else FinishReason.LENGTH)

    def _send(self, slot: int, finish_reason: FinishReason | None = None) -> None:
        job = self._running[slot]
        ids, logprobs = self._slots.take_unsent(slot)
        if len(ids) or finish_reason:
            kv_version = job.version if len(ids) and job.version < self._version else None
            delta = Delta(
                rid=job.request.rid,
                ids=ids,
                logprobs=logprobs,
                version=self._version,
                finish_reason=finish_reason,
                kv_version=kv_version,
                sampling_mask=self._slots.take_unsent_mask(slot) if self._records_masks else None,
                routed_experts=self._recorded(slot, job) if finish_reason else None,
            )
            self._deltas.append((job.ticket, delta))

    def _recorded(self, slot: int, job: Job) -> RoutedExperts | None:
        """The experts of all positions but the last, from `request.routed` on, as they were first chosen.

        What a retraction computes again may choose others, which had no part in the tokens that were there.
        """
        before = job.experts
        start = job.request.routed if before is None else before.start + before.positions
        end = len(job.request.prompt_ids) + int(self._slots.num_response[slot]) - 1
        if not self._pool.records_experts or job.prefill is not None or start >= end:
            return before
        since = self._pool.recorded(slot, start, end)
        return since if before is None else join_experts([before, since])

    def _send_nothing(self, job: Job, finish_reason: FinishReason) -> None:
        delta = Delta(
            rid=job.request.rid,
            ids=_NO_IDS,
            logprobs=_NO_LOGPROBS,
            version=self._version,
            finish_reason=finish_reason,
            routed_experts=job.experts,
        )
        self._deltas.append((job.ticket, delta))

    def _end(self, slot: int, finish_reason: FinishReason) -> None:
        self._send(slot, finish_reason)
        if finish_reason is FinishReason.STOP and self._running[slot].request.has_turns:
            self._keep(slot)
        self._vacate(slot)

    def _keep(self, slot: int) -> None:
        """Keep the cache of a turn for the next one, unless older weights have part in it."""
        job = self._running[slot]
        if job.version == self._version:
            ids = np.concatenate([job.request.prompt_ids, self._slots.response(slot)])[:-1]
            self._pool.keep(slot, job.request.rid, ids)

    def _retract(self, slot: int) -> None:
        """Back to the head of the waiting queue with all its tokens; its KV is computed again later."""
        self._send(slot)
        response, experts = self._slots.response(slot), self._recorded(slot, self._running[slot])
        job = self._vacate(slot)
        self._waiting.appendleft(Job(ticket=job.ticket, request=job.request, response=response, experts=experts))

    def _vacate(self, slot: int) -> Job:
        job = self._running.pop(slot)
        self._pool.release(slot)
        self._slots.vacate(slot)
        heapq.heappush(self._free, slot)
        self._rows = None
        self._siblings.leave(slot, job)
        if job.prefill is not None:
            self._prefills.leave(slot, job.prefill)
        return job

    def _tensor(self, values: Indices) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)
