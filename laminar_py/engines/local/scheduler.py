"""Scheduler of requests: admission, prefill, retraction and the end of each. Owns the slots and the waiting queue.

Called by the engine's thread alone. A step computes one batch of prefill, then adds tokens to every decoding slot
and collects deltas. Slots never hold more than `kv_capacity` tokens. When the cache is full the
scheduler retracts the newest request, so the oldest request always makes progress
(`tests/engines/local/test_scheduler.py`).
"""

import heapq
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from msgspec.structs import replace

from laminar_py.engines.base import RequestScheduler
from laminar_py.engines.changes import check_changes, check_served
from laminar_py.engines.local.attention import Drafts, plan_decode
from laminar_py.engines.local.drafts import MOST_DRAFT, Drafter
from laminar_py.engines.local.kv import BLOCK, BlockPool, Indices
from laminar_py.engines.local.model import LocalModel
from laminar_py.engines.local.prefill import Job, PrefillQueue
from laminar_py.engines.local.sampling import is_near, uniforms
from laminar_py.engines.local.slots import Rows, Slots, State
from laminar_py.engines.local.spec import ModelSpec
from laminar_py.records.codec import BoolArray, FloatArray, IntArray
from laminar_py.records.engine import CheckedChanges, EngineLostError, EngineStatus, GenerateRequest, RefusedError
from laminar_py.records.pieces import Recording, RoutedExperts, SamplingMask, join_experts
from laminar_py.records.proofs import WeightsChecksum
from laminar_py.records.trajectory import FinishReason

ADMISSION_HEADROOM = 16  # tokens that each running request can grow after an admission, against thrashing

SampledTokens: TypeAlias = tuple[IntArray, FloatArray, SamplingMask | None]
"""Tokens of a step, their log-probabilities, and the recorded mask."""


class Scheduler(RequestScheduler[Job]):
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
        drafts: bool = False,
        thread_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """With `drafts` a step may sample several tokens of a sequence; which steps do depends on `thread_s`, the
        CPU seconds of this thread. No token changes but for rounding."""
        super().__init__(max_len=max_len, kv_capacity=kv_capacity)  # `_running` is by slot
        self._spec, self._stream_interval, self._thread_s = spec, stream_interval, thread_s
        self._records_masks = Recording.SAMPLING_MASK in record
        self._model = LocalModel(spec, max_len=max_len)
        self._pool = BlockPool(
            spec,
            num_slots=num_slots,
            max_len=max_len,
            kv_capacity=kv_capacity,
            records_experts=Recording.ROUTED_EXPERTS in record,
            drafts=drafts,
        )
        self._slots = Slots(num_slots, max_len=max_len)
        self._drafter = Drafter(self._slots) if drafts else None
        # A heap gives the lowest slot first, so an engine that is empty again repeats a new engine bit by bit.
        self._free = list(range(num_slots))
        self._prefills = PrefillQueue(self._model, self._pool, max_len=max_len)
        self._rows: Rows | None = None  # None: the decoding slots have changed

    @property
    def has_work(self) -> bool:
        """True if a step would compute anything."""
        return self._version >= 0 and not self._paused and bool(self._running or self._waiting)

    @property
    def kv_used(self) -> int:
        """Tokens that the slots hold in the KV cache, or will hold after their prefill."""
        return self._slots.kv_used

    def status(self) -> EngineStatus:
        """See `RequestScheduler.status`; with the figures of drafts."""
        status = super().status()
        if (drafter := self._drafter) is None:
            return status
        return replace(status, drafts=drafter.counts, speedups=drafter.speedups, corpus_bytes=drafter.corpus_bytes)

    def load_weights(self, folder: Path, version: int) -> None:
        """Load the weights in `folder` as `version`, and drop kept caches of older weights.

        `RuntimeError` if requests run unpaused, `ValueError` for an older version, `RefusedError` for bad files.
        """
        self.check_load(version)
        self._model.load(folder)
        self._serve(version)

    def check_changes(self, files: Sequence[Path], version: int) -> CheckedChanges:
        """See `InferenceEngine.check_changes`. Safe to call from any thread."""
        self._check_takes_changes(version)
        return check_changes(files, version, served=self._version, sizes=self._model.sizes)

    def load_changes(self, changes: CheckedChanges) -> None:
        """Put changes into the weights. Errors as `load_weights`."""
        self._check_takes_changes(changes.version)
        check_served(changes, served=self._version)
        self.check_load(changes.version)
        self._model.change(changes)
        self._serve(changes.version)

    def _check_takes_changes(self, version: int) -> None:
        if not self.takes_changes:
            raise RefusedError(
                f"version {version}: its files' values are not served as they are; load the whole version"
            )

    def _serve(self, version: int) -> None:
        """Note that the weights of `version` are loaded."""
        self._version = version
        if self._drafter is not None:
            self._drafter.drop_stale(version)
        self._pool.drop_kept()  # the next turn must not continue over KV of older weights
        if not self._running:
            self._pool.reset()

    @property
    def takes_changes(self) -> bool:
        """See `InferenceEngine.takes_changes`. Safe to call from any thread."""
        return self._model.takes_changes

    def checksum(self) -> WeightsChecksum:
        """Hashes of the served weights; "unloaded" before the first load."""
        return self._model.checksum()

    def step(self) -> None:
        """Compute a bounded batch of prefill, then add a token, or several of a draft, to every decoding slot."""
        self._make_room()
        self._admit()
        self._prefill()
        rows = self._rows = self._rows or self._slots.decoding()
        began, before = self._thread_s(), self._slots.kv_used
        tries = self._drafter is not None and bool(rows.slots.size) and self._drafter.choose(len(rows.slots))
        drafts = self._propose(rows) if tries else None
        positions = self._slots.last_positions(rows.slots)
        self._reserve(rows.slots, positions, drafts)
        if not rows.slots.size:
            return
        sampled, near = self._decode(rows, positions, drafts)
        if drafts is None:
            self._slots.append(rows.slots, *sampled)
        else:
            self._accept(rows, drafts, sampled, near)
        if self._drafter is not None:
            gained, seconds = self._slots.kv_used - before, self._thread_s() - began
            self._drafter.record_step(len(rows.slots), drafts, gained, seconds=seconds)
        self._dispatch(rows)

    def _make_room(self) -> None:
        """Retract the newest requests until the cache has room for one more token of every running request."""
        while self._slots.kv_used + len(self._running) > self._kv_capacity:
            self._retract(next(reversed(self._running.values())))

    def _admit(self) -> None:
        """Move waiting requests into free slots, in order, until the cache has no room for the next request."""
        while self._waiting and self._free and self._has_room(self._waiting[0]):
            job, slot = self._waiting.popleft(), heapq.heappop(self._free)
            job.slot = slot
            self._slots.occupy(slot, job.request, response=job.response)
            self._fill_cache(slot, job)
            self._running[slot] = job

    def _has_room(self, job: Job) -> bool:
        """True if the cache has room for `job` and headroom. Alone it fits, since `kv_capacity >= max_len`."""
        growth = ADMISSION_HEADROOM * (len(self._running) + 1)
        needed = len(job.request.prompt_ids) + len(job.response) + growth
        return not self._running or self._slots.kv_used + needed <= self._kv_capacity

    def _fill_cache(self, slot: int, job: Job) -> None:
        """Fill the cache of `slot` for `job` by the cheapest way.

        The ways are: restore the cache of the last turn, copy the prompt's KV from a sibling, join a sibling's
        prefill, or start a prefill.
        """
        ids = job.cached_ids
        num_kept = self._pool.restore(slot, job.request.rid, ids)
        siblings = (other for other in self._running.values() if other.can_lend_to(job, self._version))
        lender = next(siblings, None)
        if num_kept == len(ids):
            self._start(slot, job, version=self._version)
        elif num_kept or lender is None:
            job.prefill = self._prefills.add(slot, ids, done=num_kept, version=self._version)
        elif lender.prefill is not None:
            lender.prefill.slots.append(slot)
            job.prefill = lender.prefill
        else:
            self._pool.share(lender.slot, slot, len(ids))
            self._start(slot, job, version=lender.version)

    def _prefill(self) -> None:
        """Compute one batch of prefill, and let requests decode whose prefill is complete."""
        for prefill in self._prefills.run(self._version):
            for slot in prefill.slots:
                self._start(slot, self._running[slot], version=prefill.version)

    def _start(self, slot: int, job: Job, *, version: int) -> None:
        """Let `job` decode: its cache has all tokens but the last, by weights of `version` or newer."""
        job.prefill, job.version = None, version
        self._slots.state[slot] = State.DECODING
        self._rows = None
        if self._drafter is not None:
            self._drafter.follow(job)

    def _reserve(self, slots: Indices, positions: Indices, drafts: Drafts | None = None) -> None:
        """Reserve cache for a token of each of `slots [B]`, at `positions [B]`, and for `drafts` behind it."""
        offsets, ends = positions % BLOCK, positions if drafts is None else positions + drafts.counts
        for index in np.flatnonzero((offsets == 0) | (offsets + ends - positions >= BLOCK)).tolist():
            self._pool.extend(int(slots[index]), int(ends[index]) + 1)
        self._pool.compact()

    def _propose(self, rows: Rows) -> Drafts | None:
        """Draft tokens for each row within its limit and its share of the cache; None if no draft pays."""
        assert self._drafter is not None, "only with drafts"
        spare = self._kv_capacity - self._slots.kv_used - len(self._running)  # with one more token for each
        most = min(MOST_DRAFT, spare // len(rows.slots) - 1)
        limits = np.minimum(rows.limits - self._slots.num_response[rows.slots] - 1, most).tolist()
        return self._drafter.propose([self._running[slot] for slot in rows.slots.tolist()], limits)

    def _decode(
        self, rows: Rows, positions: Indices, drafts: Drafts | None = None
    ) -> tuple[SampledTokens, BoolArray | None]:
        """Sample the next token behind the last of each of B rows, and behind each token of `drafts`: T in all.

        Returns these T tokens; with drafts also which of them are near a boundary, `[T]`. Raises `EngineLostError`
        if a log-probability is not finite.
        """
        slots, sampler, seeds = rows.slots, rows.sampler, rows.seeds
        ids, num_response = self._slots.last_ids[slots], self._slots.num_response[slots]
        plan = plan_decode(self._pool, slots=slots, positions=positions, spec=self._spec, drafts=drafts)
        if drafts is not None:
            seeds, sampler = seeds[drafts.of_token], self._slots.sampler(slots[drafts.of_token])
            positions, num_response = drafts.behind_each(positions), drafts.behind_each(num_response)
            ids = drafts.fed_behind(ids)
        logits, experts = self._model.decode(torch.from_numpy(ids), torch.from_numpy(positions), plan=plan)
        if experts is not None:
            self._pool.record(plan.write_blocks, plan.write_offsets, experts)
        numbers = uniforms(seeds, num_response)
        drawn = sampler.draw(
            logits,
            torch.from_numpy(numbers),
            recorded=self._records_masks,
            with_edges=drafts is not None,
        )
        values = drawn.logprobs.cpu().numpy()
        if not np.isfinite(values).all():
            raise EngineLostError(
                f"version {self._version} gives logits that are not finite; lower learner.lr, and --resume from an"
                " earlier checkpoint"
            )
        near = None if drawn.edges is None else is_near(drawn.edges.cpu().numpy(), numbers)
        return (drawn.ids.cpu().numpy(), values, drawn.mask), near

    def _accept(self, rows: Rows, drafts: Drafts, sampled: SampledTokens, near: BoolArray | None) -> None:
        """Add to each row its `sampled` tokens (T in all) up to the first that its draft lacks or that ends it."""
        assert self._drafter is not None, "only with drafts"
        assert near is not None, "only with drafts"
        ids = sampled[0]
        ends = (ids[:, None] == rows.stop_ids[drafts.of_token]).any(1)
        hits = np.zeros(len(ids), np.bool_)  # [T] the next token of the draft was sampled
        is_draft = np.flatnonzero(drafts.behind)
        hits[is_draft - 1] = ids[is_draft - 1] == drafts.ids
        misses = np.flatnonzero(~hits | ends)
        accepted = misses[np.searchsorted(misses, drafts.starts)] - drafts.starts
        self._slots.append_runs(rows.slots, drafts, 1 + accepted, *sampled)
        num_near = int((near & (drafts.behind <= accepted[drafts.of_token])).sum())
        self._drafter.record_accepted(drafts.counts, accepted, near=num_near)

    def _dispatch(self, rows: Rows) -> None:
        """After a step, send the deltas that are due and end finished requests."""
        slots = rows.slots
        num_response = self._slots.num_response[slots]
        stopped = (self._slots.last_ids[slots, None] == rows.stop_ids).any(1)
        ended = stopped | (num_response >= rows.limits)
        due = num_response - self._slots.num_sent[slots] >= self._stream_interval
        for slot in slots[due & ~ended].tolist():
            self._send(self._running[slot])
        for slot, is_stop in zip(slots[ended].tolist(), stopped[ended].tolist(), strict=True):
            self._end(self._running[slot], FinishReason.STOP if is_stop else FinishReason.LENGTH)

    def _make_job(self, ticket: int, request: GenerateRequest) -> Job:
        if self._drafter is not None:
            self._drafter.take_earlier(request)
        return Job(ticket=ticket, request=request, response=request.prefix_ids)

    def _send(self, job: Job, finish_reason: FinishReason | None = None) -> None:
        """Pass on the unsent tokens of a job; the last delta has the finish reason and the routed experts."""
        ids, logprobs = self._slots.take_unsent(job.slot)
        if len(ids) or finish_reason:
            self._add_delta(
                job,
                ids,
                logprobs,
                finish_reason,
                sampling_mask=self._slots.take_unsent_mask(job.slot) if self._records_masks else None,
                routed_experts=self._recorded(job) if finish_reason else None,
            )

    def _recorded(self, job: Job) -> RoutedExperts | None:
        """Experts of all positions but the last, from `request.routed` on, as first chosen; None if not recorded.

        A prefill after a retraction may choose other experts, which did not produce the existing tokens.
        """
        before = job.experts
        start = job.request.routed if before is None else before.start + before.positions
        end = len(job.request.prompt_ids) + int(self._slots.num_response[job.slot]) - 1
        if not self._pool.records_experts or job.prefill is not None or start >= end:
            return before
        since = self._pool.recorded(job.slot, start, end)
        return since if before is None else join_experts([before, since])

    def _end(self, job: Job, finish_reason: FinishReason) -> None:
        """Send the last delta of a running request and free its slot. Keep its cache for its next turn."""
        self._send(job, finish_reason)
        # the next turn must not continue a cache that older weights computed in part
        if finish_reason is FinishReason.STOP and job.request.has_turns and job.version == self._version:
            ids = np.concatenate([job.request.prompt_ids, self._slots.response(job.slot)])[:-1]
            self._pool.keep(job.slot, job.request.rid, ids)
        if self._drafter is not None and finish_reason is not FinishReason.ABORT:
            self._drafter.keep(job, self._slots.response(job.slot), version=self._version)
        self._vacate(job)

    def _retract(self, job: Job) -> None:
        """Send a running request's tokens, free its slot, and put it at the head of the waiting queue."""
        self._send(job)  # the KV cache of its tokens is computed again later
        response, experts = self._slots.response(job.slot), self._recorded(job)
        self._vacate(job)
        self._waiting.appendleft(Job(ticket=job.ticket, request=job.request, response=response, experts=experts))

    def _vacate(self, job: Job) -> None:
        """Free the slot and the cache of a request that leaves the batch."""
        slot = job.slot
        del self._running[slot]
        self._pool.release(slot)
        self._slots.vacate(slot)
        heapq.heappush(self._free, slot)
        self._rows = None
        if job.prefill is not None:
            self._prefills.leave(slot, job.prefill)
        if self._drafter is not None:
            self._drafter.forget(job)
