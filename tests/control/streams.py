"""One trajectory of a real scheduler whose streams the test plays, on an engine that records everything."""

import numpy as np

from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.salvage import salvage
from laminar_py.ledger.segments.writer import Journal, SegmentWriter, tokens_ref
from laminar_py.records.codec import decode, encode
from laminar_py.records.engine import Delta, EngineStatus
from laminar_py.records.replica import Assignment, ReplicaReport
from laminar_py.records.spans import Span, merge_spans
from laminar_py.records.trajectory import FinishReason, InterruptReason
from laminar_py.rollout.running import begin
from tests.builders import make_experts, make_mask
from tests.control.fleet import Fleet

ID, PROMPT = "g0.0", 3
NO_IDS, NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


def token_ids(start, end):
    """A response has the same token at a place whatever its streams."""
    return (np.arange(start, end, dtype=np.int32) * 7) % 50


class Streams:
    """Streams of `g0.0`, e.g. three tokens under versions 4, 4, 5, then `stop`: `await play([4, 4, 5])`.

    Versions are those that the stream said; `sure` are the engine's last words on them, where they differ. An
    entry is a version, or a version and that of its KV cache. Segments and journals are in `folder`.
    """

    def __init__(self, folder, *, recorder=None):
        settings = {"one_version": False, "min_group_survivors": 1, "group_size": 1}
        self.fleet = Fleet(replicas=1, capacity=1, recorder=recorder, **settings)
        self.requests = []
        self.known = []  # what is to be known in the end, token by token
        self._running = None
        self._folder = folder
        self._segment, self._journal = SegmentWriter(folder, "replica-0"), Journal(folder, "replica-0")

    @property
    def trajectory(self):
        return self.fleet.scheduler.state.live[ID]

    @property
    def spans(self):
        """What is to be known in the end."""
        return spans_of(self.known)

    def response(self):
        """What is known of the response, as it was stored."""
        tokens = self.trajectory.tokens
        return PayloadReader(self._folder).load(one.at for one in tokens).response(tokens)

    async def play(self, said, *, sure=None, end="stop", report_after=None, note_after=None, recorded=True):
        """Ends: `stop`; `abort` hands it back; `new_weights` resumes here; `cut`: the engine died.

        `killed`: so did the replica, and what it had neither reported nor noted in its journal is lost.
        """
        if self._running is None:
            await self.fleet.report(0)
            assignment = self.fleet.running[0].pop(ID)
            self._running = begin(decode(Assignment, encode(assignment)), 0.0)
            self._running.prefix = self.response().ids
        request = self._running.request()
        self.requests.append(request)
        start = len(request.prefix_ids)
        assert request.prefix_ids.tolist() == token_ids(0, start).tolist()
        for place, version in enumerate(said, start):
            self._take(place, place + 1, version, recorded)
            if place - start + 1 == report_after:
                await self._report(None)
            if place - start + 1 == note_after:
                self._journal.write([piece for piece in [self._running.pop_unjournaled(0.0)] if piece is not None])
        if end == "killed":
            kept = [after for after in (report_after, note_after) if after in range(1, len(said) + 1)]
            said = said[: max(kept, default=0)]
        elif end != "cut":
            self._take_last(request, start + len(said), sure, end, recorded)
        self.known += said if sure is None or end in ("cut", "killed") else sure
        await self._end(end)

    def _take(self, start, end, said, recorded):
        version, kv_version = said if isinstance(said, tuple) else (said, None)
        ids = token_ids(start, end)
        mask = make_mask(ids) if recorded else None
        logprobs = np.full(len(ids), -0.5, np.float32)
        delta = Delta(
            rid=ID, ids=ids, logprobs=logprobs, version=version, kv_version=kv_version, sampling_mask=mask
        )
        self._running.append_delta(delta, 0.0)

    def _take_last(self, request, length, sure, end, recorded):
        reason = FinishReason.STOP if end == "stop" else FinishReason.ABORT
        experts = make_experts(request.routed, PROMPT + length - 1) if recorded else None
        spans = None if sure is None else spans_of(sure)
        self._running.append_delta(
            Delta(
                rid=ID,
                ids=NO_IDS,
                logprobs=NO_LOGPROBS,
                version=0,
                finish_reason=reason,
                spans=spans,
                routed_experts=experts,
            ),
            0.0,
        )

    async def _report(self, end):
        reasons = {"stop": FinishReason.STOP, "abort": FinishReason.ABORT}
        breaks = {"new_weights": InterruptReason.NEW_WEIGHTS, "cut": InterruptReason.ENGINE_LOST}
        piece = self._running.unreported(0.0)
        tokens = None if piece is None else tokens_ref(piece, self._segment.write(piece))
        progress = self._running.pop_progress(tokens, reasons.get(end), 0.0, broken=breaks.get(end))
        received = self.fleet.received[0]
        status = EngineStatus(running=0, waiting=0, kv_used=0, kv_capacity=1, version=0)
        report = ReplicaReport(replica=0, status=status, admissible=0, received=received, progress=(progress,))
        await self.fleet.scheduler.incoming.on_report(decode(ReplicaReport, encode(report)))

    async def _end(self, end):
        if end != "killed":
            await self._report(end)
        if end in ("cut", "killed"):
            running = self.fleet.scheduler.incoming.running_on(0)
            found = salvage(self._folder, "replica-0", running).found
            await self.fleet.lose_replica(0, salvaged=found)
            self.fleet.received[0] = 0
        if end != "new_weights":
            self._running = None


def spans_of(labels):
    """Spans of tokens with these versions, e.g. `[4, (5, 4)]`."""
    pairs = [label if isinstance(label, tuple) else (label, None) for label in labels]
    return merge_spans(Span(version, i, i + 1, kv) for i, (version, kv) in enumerate(pairs))
