"""Small real runs for tests of the ledger and of its readers."""

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import numpy as np

from laminar_lab.audit.stored import StoredResponses
from laminar_py.ledger.database import LEDGER_NAME, reading, segments_path
from laminar_py.ledger.ledger import Ledger
from laminar_py.ledger.recovery import rollback_events
from laminar_py.ledger.rows import trajectory_rows
from laminar_py.ledger.segments.writer import SegmentWriter, tokens_ref
from laminar_py.records.codec import response_digest
from laminar_py.records.events import (
    Assigned,
    Checkpointed,
    Consumed,
    Issued,
    Ready,
    Replayed,
    Scored,
    Stepped,
)
from laminar_py.records.pieces import ColumnPiece, ColumnRef, Piece, pack_experts, pack_mask
from laminar_py.records.scoring import TermValue
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import Kind
from tests.builders import make_experts, make_mask, make_prompt
from tests.events import finished, run_started, version_published


class Ticks:
    """A clock that goes on by a second with every look at it."""

    def __init__(self):
        self.at = 0.0

    def now(self):
        self.at += 1.0
        return self.at


async def undo_since(ledger, step, *, reason):
    """What to append when the learner went back to the checkpoint of `step`."""
    await ledger.commit()
    return rollback_events(ledger._reader, step, reason)


@asynccontextmanager
async def open_ledger(run: Path):
    ledger = Ledger(run / LEDGER_NAME, host="host-1", clock=Ticks())
    await ledger.start()
    try:
        async with asyncio.timeout(30):
            yield ledger
    finally:
        await ledger.close()
        payload_of(ledger).end_segment()


class RunPayload:
    """Segments of a run, and digests of the tokens in them by trajectory: what a replica would know."""

    def __init__(self, run):
        self._folder = segments_path(run)
        self.writer = SegmentWriter(self._folder, "replica-0-1-0")
        self.digests = defaultdict(list)

    def end_segment(self):
        self.writer.close()
        self.writer = SegmentWriter(self._folder, "replica-0-1-0")


@cache
def _payload_in(run):
    return RunPayload(run)


def run_of(ledger):
    """The folder of the run that a ledger records."""
    return ledger._path.parent


def payload_of(ledger):
    """One writer for each run folder; `open_ledger` closes its file, and a later one makes another."""
    return _payload_in(run_of(ledger))


def store(
    ledger, id, start, end, spans, *, ids=None, logprobs=None, sampling_mask=None, routed_experts=None, epoch=1
):
    """Response tokens [start, end): a piece in a segment, and its reference in the ledger."""
    own_ids, own_logprobs = tokens(id, start, end)
    piece = Piece(
        trajectory_id=id,
        epoch=epoch,
        start=start,
        spans=spans,
        ids=(own_ids if ids is None else ids).tobytes(),
        logprobs=(own_logprobs if logprobs is None else logprobs).tobytes(),
        mask=None if sampling_mask is None else pack_mask(sampling_mask),
        experts=None if routed_experts is None else pack_experts(routed_experts),
    )
    payload = payload_of(ledger)
    ref = tokens_ref(piece, payload.writer.write(piece))
    ledger.store_tokens(id, ref, spans)
    payload.digests[id].append(ref.at.digest)
    return ref


def store_columns(ledger, id, columns):
    """Columns of a response by name: pieces in a segment, and their references in the ledger."""
    writer = payload_of(ledger).writer
    ledger.store_columns(
        id,
        {
            name: ColumnRef(values.dtype, writer.write(ColumnPiece(trajectory_id=id, name=name, values=values)))
            for name, values in columns.items()
        },
    )


def digest_of(ledger, id):
    """Digest of the response that was stored of a trajectory."""
    return response_digest(payload_of(ledger).digests[id])


def read_response(run, id):
    """The response of a trajectory, wherever its pieces are; `LedgerError` where they are lost."""
    with reading(run) as connection:
        (row,) = trajectory_rows(connection, "id = ?", (id,))
        return StoredResponses(run, connection).response(row)


def begin(
    ledger, *, incarnation=1, drain=False, max_staleness=None, versions=(0,), data=None, command_s=None, **more
):
    """A run with some versions published."""
    ledger.append(
        run_started(
            incarnation=incarnation,
            drain=drain,
            max_staleness=max_staleness,
            data=data or {},
            command_s=command_s,
            **more,
        )
    )
    for version in versions:
        publish(ledger, version, incarnation=incarnation)


def publish(ledger, version, *, incarnation=1, stall_s=0.1, num_bytes=10):
    """A version, as the learner published it."""
    ledger.append(version_published(version, incarnation=incarnation, num_bytes=num_bytes, stall_s=stall_s))


def tokens(id, start, end):
    """Ids and log-probabilities of response tokens [start, end), the same at every call."""
    rng = np.random.default_rng(sum(id.encode()))
    ids, logprobs = rng.integers(0, 99, 999).astype(np.int32), -rng.random(999).astype(np.float32)
    return ids[start:end], logprobs[start:end]


def issue(ledger, id, *, kind=Kind.TRAIN, index=0):
    """QUEUED, with its prompt."""
    group, _, sample = id.partition(".")
    ledger.store_prompt(make_prompt(index))
    ledger.append(
        Issued(
            trajectory_id=id,
            group_id=group,
            prompt_id=f"p{index}",
            prompt_index=index,
            sample_index=int(sample),
            kind=kind,
        )
    )


def run_to(ledger, id, spans, *, replica=0, epoch=1, start=0, recorded=False):
    """RUNNING, with one stored piece for each span (version, start, end) or (version, start, end, KV version)."""
    ledger.append(Assigned(id, replica, epoch, start))
    for span in (Span(*fields) for fields in spans):
        more = recording(id, span.start, span.end) if recorded else {}
        store(ledger, id, span.start, span.end, (span,), epoch=epoch, **more)


def recording(id, start, end, *, prompt=3):
    """Masks and experts that come with response tokens [start, end), the last of their stream."""
    routed = prompt + start - 1 if start else 0
    mask = make_mask(tokens(id, start, end)[0])
    return {"sampling_mask": mask, "routed_experts": make_experts(routed, prompt + end - 1)}


def finish(ledger, id, spans, *, epoch=1, reward=1.0):
    """READY, after `run_to` with all spans."""
    score(ledger, id, spans, epoch=epoch, reward=reward)
    ledger.append(Ready(id, 0.5))


def score(ledger, id, spans, *, epoch=1, reward=1.0, roles=()):
    """SCORED, after `run_to` with all spans."""
    whole = tuple(span if isinstance(span, Span) else Span(*span) for span in spans)
    ledger.append(finished(id, whole, epoch=epoch, digest=digest_of(ledger, id)))
    given = {"terms": [TermValue(name="math", value=reward)]} if id.startswith("e") else {}  # of an evaluation
    ledger.append(Scored(trajectory_id=id, reward=reward, elapsed_s=0.01, roles=roles, **given))


def make_ready(ledger, id, *, spans=((0, 0, 5),), recorded=False, **kwargs):
    """From issue to READY."""
    issue(ledger, id, **kwargs)
    run_to(ledger, id, spans, recorded=recorded)
    finish(ledger, id, spans)


def consume(step, version, *ids, staleness=None, weight=1.0, elapsed_s=0.3, waited_s=0.0, reference_s=0.0):
    """The events of one learner step; of trajectories that version 0 drew, if no staleness is given."""
    age = max(0, step - 1) if staleness is None else staleness
    used = [Consumed(trajectory_id=id, step=step, version=version, staleness=age, weight=weight) for id in ids]
    return [
        Stepped(
            step=step,
            incarnation=1,
            num_trajectories=len(ids),
            num_tokens=5 * len(ids),
            loss=0.1 if ids else None,
            grad_norm=0.2 if ids else None,
            reward=1.0,
            elapsed_s=elapsed_s,
            waited_s=waited_s,
            reference_s=reference_s,
        ),
        *used,
    ]


def replayed(step, *, id="g0.0", version=0, staleness=None, weight=1.0):
    """A step trains on a consumed trajectory again; version 0 drew it, if no staleness is given."""
    age = step - 1 if staleness is None else staleness
    return Replayed(trajectory_id=id, step=step, version=version, staleness=age, weight=weight)


def checkpoint(step, version):
    """A checkpoint of that step."""
    return Checkpointed(step=step, version=version, path=f"checkpoints/step-{step}", stall_s=0.1, elapsed_s=0.4)
