"""Which requests run: admission, prefill, retraction and the end of each. Owns the slots and the waiting queue.

Called by the engine's thread alone. A step makes one batch of prefill and adds one token to every decoding
slot; what leaves is collected as deltas. Invariant: the slots never hold more than
`kv_capacity` tokens, and the oldest of them is never the one that makes room.
"""

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from laminar_py.codec import FloatArray, IntArray
from laminar_py.engines.local_attention import plan_decode
from laminar_py.engines.local_kv import BLOCK, BlockPool, Indices
from laminar_py.engines.local_model import LocalModel
from laminar_py.engines.local_prefill import Prefill, PrefillQueue
from laminar_py.engines.local_sampling import PLAIN, Sampler, Seeds, uniforms
from laminar_py.engines.local_slots import Slots, State
from laminar_py.engines.local_spec import ModelSpec
from laminar_py.engines.requests import response_limit
from laminar_py.types import Delta, EngineStatus, FinishReason, GenerateRequest, PauseMode, SamplingMask

ADMISSION_HEADROOM = 16  # steps that everything running can grow by after an admission, against thrashing

_NO_IDS = np.zeros(0, np.int32)
_NO_LOGPROBS = np.zeros(0, np.float32)


@dataclass(slots=True, eq=False)
class _Job:
    """One request in the engine, e.g. `_Job(7, request, request.prefix_ids)` while it waits."""

    ticket: int  # the stream that its deltas go to
    request: GenerateRequest
    response: IntArray  # [L] what it had when it last joined the waiting queue
    version: int = -1  # the oldest weights in its KV cache, once that is complete
    prefill: Prefill | None = None

    @property
    def cached_ids(self) -> IntArray:
        """Tokens that must be in the cache before it decodes: all but the last."""
        return np.concatenate([self.request.prompt_ids, self.response])[:-1]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The decoding slots and what stays the same for them from step to step."""

    slots: Indices  # [B]
    seeds: Seeds  # [B]
    limits: Indices  # [B]
    stop_ids: Indices  # [B, most of any]
    sampler: Sampler


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
        records_masks: bool = False,
        device: torch.device,
    ) -> None:
        self._spec, self._device = spec, device
        self._max_len, self._kv_capacity, self._stream_interval = max_len, kv_capacity, stream_interval
        self._records_masks = records_masks
        self._model = LocalModel(spec, max_len=max_len, device=device)
        self._pool = BlockPool(spec, num_slots=num_slots, max_len=max_len, kv_capacity=kv_capacity, device=device)
        self._slots = Slots(num_slots, max_len=max_len)
        # A heap: the lowest comes first, so that an engine which is empty again is like a fresh one, bit by bit.
        self._free = list(range(num_slots))
        self._running: dict[int, _Job] = {}  # by slot, the oldest admission first
        self._groups: defaultdict[str, list[int]] = defaultdict(list)  # slots by group
        self._waiting: deque[_Job] = deque()
        self._prefills = PrefillQueue(self._model, self._pool, max_len=max_len, device=device)
        self._rows: _Rows | None = None  # None: the decoding slots have changed
        self._deltas: list[tuple[int, Delta]] = []
        self._paused = False
        self._version = -1

    @property
    def runnable(self) -> bool:
        """Whether a step would do anything."""
        return self._version >= 0 and not self._paused and bool(self._running or self._waiting)

    def status(self) -> EngineStatus:
        """May be called from any thread."""
        return EngineStatus(
            len(self._running), len(self._waiting), self._slots.kv_used, self._kv_capacity, self._version
        )

    def take_deltas(self) -> list[tuple[int, Delta]]:
        """What has left since the last call, by ticket, in order."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def submit(self, ticket: int, request: GenerateRequest) -> None:
        """Queue a request that fits `max_len`."""
        if len(request.prefix_ids) >= response_limit(request, max_len=self._max_len):
            self._send_nothing(_Job(ticket, request, request.prefix_ids), FinishReason.LENGTH)
        else:
            self._waiting.append(_Job(ticket, request, request.prefix_ids))

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
        """Serve `folder` as `version`. `RuntimeError` while requests run, `ValueError` if it does not fit."""
        if self._running and not self._paused:
            raise RuntimeError(
                f"version {version} cannot load while {len(self._running)} requests run; pause first"
            )
        if version < self._version:
            raise ValueError(f"version {version} is older than {self._version}; versions never go back")
        self._model.load(folder)
        self._version = version
        if not self._running:
            self._pool.forget()

    def checksum(self) -> str:
        """See `Weights.checksum`; "unloaded" before the first load."""
        return self._model.checksum()

    def step(self) -> None:
        """One token for everything that decodes, after a bounded amount of prefill."""
        self._make_room()
        self._admit()
        self._prefill()
        rows = self._rows = self._rows or self._collect_rows()
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
            self._groups[job.request.group_id].append(slot)

    def _has_room(self, job: _Job) -> bool:
        """A sequence that is alone always fits, because `kv_capacity` is at least `max_len`."""
        growth = ADMISSION_HEADROOM * (len(self._running) + 1)
        needed = len(job.request.prompt_ids) + len(job.response) + growth
        return not self._running or self._slots.kv_used + needed <= self._kv_capacity

    def _fill_cache(self, slot: int, job: _Job) -> None:
        """Copy the prompt's KV from a sibling, join the prefill of one, or begin a prefill."""
        ids = job.cached_ids
        sibling = self._sibling(job)
        if not len(ids):
            self._start(slot, job, version=self._version)
        elif sibling is None:
            job.prefill = self._prefills.add(slot, ids)
        elif (prefill := self._running[sibling].prefill) is not None:
            prefill.slots.append(slot)
            job.prefill = prefill
        else:
            self._pool.share(sibling, slot, len(ids))
            self._start(slot, job, version=self._running[sibling].version)

    def _sibling(self, job: _Job) -> int | None:
        """A slot whose cache begins, or will, with exactly what `job` needs, made by the present weights."""
        if len(job.response):
            return None
        for slot in self._groups[job.request.group_id]:
            other = self._running[slot]
            if other.prefill is None:
                usable = other.version == self._version
            else:
                usable = other.prefill.made_by(self._version) and not len(other.response)
            if usable and np.array_equal(other.request.prompt_ids, job.request.prompt_ids):
                return slot
        return None

    def _prefill(self) -> None:
        for prefill in self._prefills.run(self._version):
            for slot in prefill.slots:
                self._start(slot, self._running[slot], version=prefill.version)

    def _start(self, slot: int, job: _Job, *, version: int) -> None:
        """All but the last token of `job` are in the cache, the oldest of them by `version`."""
        job.prefill, job.version = None, version
        self._slots.state[slot] = State.DECODING
        self._rows = None

    def _collect_rows(self) -> _Rows:
        slots = self._slots
        rows = np.flatnonzero(slots.state == State.DECODING)
        sampler = PLAIN
        if not slots.plain[rows].all():
            sampler = Sampler.build(
                slots.temperatures[rows],
                top_k=slots.top_k[rows],
                top_p=slots.top_p[rows],
                min_p=slots.min_p[rows],
                device=self._device,
            )
        return _Rows(rows, slots.seeds[rows], slots.limit[rows], slots.stop_ids[rows], sampler)

    def _reserve(self, slots: Indices, positions: Indices) -> None:
        """A place in the cache for one token of each of `slots [B]`, at `positions [B]`."""
        for index in np.flatnonzero(positions % BLOCK == 0).tolist():
            self._pool.extend(int(slots[index]), int(positions[index]) + 1)
        self._pool.settle()

    def _decode(self, rows: _Rows, positions: Indices) -> tuple[IntArray, FloatArray, SamplingMask | None]:
        """The next token of each row and its log-probability, `[B]`, and its sampling mask, if recorded."""
        num_response = self._slots.num_response[rows.slots]
        plan = plan_decode(self._pool, slots=rows.slots, positions=positions, num_heads=self._spec.num_heads)
        last_ids = self._tensor(self._slots.last_ids[rows.slots])
        logits = self._model.decode(last_ids, self._tensor(positions), plan=plan)
        uniform = torch.from_numpy(uniforms(rows.seeds, num_response)).to(self._device)
        drawn = rows.sampler.draw(logits, uniform, recorded=self._records_masks)
        values = drawn.logprobs.cpu().numpy()
        if not np.isfinite(values).all():
            raise FloatingPointError(
                f"version {self._version} gives logits that are not finite; go back before it"
            )
        return drawn.ids.cpu().numpy(), values, drawn.mask

    def _dispatch(self, rows: _Rows, ids: IntArray) -> None:
        """Send what is due after a step and end what has ended."""
        slots = rows.slots
        num_response = self._slots.num_response[slots]
        stopped = (ids[:, None] == rows.stop_ids).any(1)
        ended = stopped | (num_response >= rows.limits)
        due = num_response - self._slots.num_sent[slots] >= self._stream_interval
        for slot in slots[due & ~ended].tolist():
            self._send(slot)
        for slot, is_stop in zip(slots[ended].tolist(), stopped[ended].tolist(), strict=True):
            self._end(slot, FinishReason.STOP if is_stop else FinishReason.LENGTH)

    def _send(self, slot: int, finish_reason: FinishReason | None = None) -> None:
        job = self._running[slot]
        ids, logprobs = self._slots.take_unsent(slot)
        if len(ids) or finish_reason:
            kv_version = job.version if len(ids) and job.version < self._version else None
            mask = self._slots.take_unsent_mask(slot) if self._records_masks else None
            delta = Delta(
                job.request.rid, ids, logprobs, self._version, finish_reason, kv_version, sampling_mask=mask
            )
            self._deltas.append((job.ticket, delta))

    def _send_nothing(self, job: _Job, finish_reason: FinishReason) -> None:
        delta = Delta(job.request.rid, _NO_IDS, _NO_LOGPROBS, self._version, finish_reason)
        self._deltas.append((job.ticket, delta))

    def _end(self, slot: int, finish_reason: FinishReason) -> None:
        self._send(slot, finish_reason)
        self._vacate(slot)

    def _retract(self, slot: int) -> None:
        """Back to the head of the waiting queue with all its tokens; its KV is computed again later."""
        self._send(slot)
        response = self._slots.response(slot)
        job = self._vacate(slot)
        self._waiting.appendleft(_Job(job.ticket, job.request, response))

    def _vacate(self, slot: int) -> _Job:
        job = self._running.pop(slot)
        self._pool.release(slot)
        self._slots.vacate(slot)
        heapq.heappush(self._free, slot)
        self._rows = None
        self._leave_group(slot, job)
        if job.prefill is not None:
            self._prefills.leave(slot, job.prefill)
        return job

    def _leave_group(self, slot: int, job: _Job) -> None:
        members = self._groups[job.request.group_id]
        members.remove(slot)
        if not members:
            del self._groups[job.request.group_id]

    def _tensor(self, values: Indices) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)
