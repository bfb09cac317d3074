"""Everything that the tapes know of the package: how its classes are built, and plain values to and from them.

A refactor of the package edits this module and no other of `tests/tapes`; the tapes stay as they are.
"""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol
from zlib import crc32

import msgspec
import numpy as np
from blake3 import blake3

from laminar_lab.bench.paper_planner import MARGIN
from laminar_py.config.algorithm import Advantage, Aggregation
from laminar_py.config.rollout import PLANNERS, Schedule, StalePolicy, WithoutSignal
from laminar_py.control.evaluation import EvaluationLostError
from laminar_py.control.groups import Credit
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.control.settings import Admission, ControlSettings, StalenessBound
from laminar_py.learner.losses.advantages import group_advantages, overlong_cost
from laminar_py.learner.packing.balance import attention_share, fit_bins
from laminar_py.learner.packing.buffer import Packing
from laminar_py.learner.packing.packer import Packed, deal_to_ranks, pack, step_weights
from laminar_py.ledger.database import LEDGER_NAME, reading, segments_path
from laminar_py.ledger.ledger import Ledger
from laminar_py.ledger.recovery import recover, unpublished
from laminar_py.ledger.segments.payload import Payload
from laminar_py.ledger.segments.reader import PayloadReader, complete_all
from laminar_py.ledger.segments.writer import SegmentWriter, tokens_ref
from laminar_py.records.columns import (
    REFERENCE_LOGPROBS,
    TEACHER_LOGPROBS,
    TOKEN_REWARDS,
    Column,
    Source,
    TokenValues,
    token_values,
)
from laminar_py.records.credit import earned_by
from laminar_py.records.engine import EngineStatus, SamplingParams
from laminar_py.records.evaluations import set_figures
from laminar_py.records.events import (
    Checkpointed,
    Evaluated,
    Finished,
    PartCrashed,
    PartStarted,
    RolledBack,
    RunEnded,
    RunStarted,
    Stepped,
    VersionLoaded,
    VersionPublished,
)
from laminar_py.records.pieces import (
    ColumnPiece,
    ColumnRef,
    Piece,
    TokensRef,
    pack_experts,
    pack_mask,
    unpack_experts,
    unpack_mask,
)
from laminar_py.records.replica import Move, Progress, ReplicaReport, Survey, TrajectorySummary
from laminar_py.records.scoring import Score
from laminar_py.records.spans import Span, encode_spans
from laminar_py.records.trajectory import (
    Cap,
    DropReason,
    FinishReason,
    InterruptReason,
    Kind,
    Prompt,
    Status,
    Trajectory,
    TrajectoryRef,
)
from laminar_py.repack.migration import Migration, MigrationSettings
from laminar_py.repack.planner import PlanningContext
from laminar_py.repack.signals import EngineSpeed, GroupForecast, RemainingTokens
from tests.builders import make_experts, make_mask
from tests.ledger.runs import undo_since
from tests.tapes.plain import Given, Look, Said, Tape, Told, Verdict, number
from tests.tapes.plans import Plan

SPEED = EngineSpeed(step_s=0.02, step_s_per_sequence=0.0, step_s_per_token=8e-6, prefill_tokens_per_s=25_000.0)
ROOFLINE = 6  # sequences, for the paper's planner
ATTENTION_SHARE = 0.002
SHORT = 5  # characters of a digest that a tape has
DELAYED = frozenset({"repacked"})  # recorded by a task of its own
UNTOLD = ("at_once", "terms", "earned", "roles")  # of a score: no decision follows from them that is on no tape


class Clock:
    """Clock of the virtual loop."""

    def now(self) -> float:
        """Seconds since the incarnation began."""
        return asyncio.get_running_loop().time()


# ---- plain values


def plain(value: object) -> object:
    """Lists, strings and numbers; floats of twelve digits, digests and bytes cut short."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return [[plain(key), plain(value[key])] for key in sorted(value)]
    if isinstance(value, str) and len(value) == 32 and set(value) <= set("0123456789abcdef"):
        return value[:SHORT]
    return value


def span_rows(spans: Sequence[Span]) -> list[list[int | None]]:
    """Fields of spans in order; a turn's limit and stop strings where there are any."""
    return json.loads(encode_spans(tuple(spans)))


def event_line(event: msgspec.Struct) -> list:
    """The tag under which it goes to disk, and its fields in order; of an evaluation what tapes have of it."""
    if isinstance(event, Evaluated):
        figures = event.figures
        counts = figures.problems, number(figures.mean.value), event.rl_s, figures.unscored
        return ["evaluated", event.version, event.step, *counts]
    names = [name for name in event.__struct_fields__ if name not in UNTOLD]
    fields = [
        span_rows(value) if name == "spans" else msgspec.to_builtins(value)
        for name, value in ((name, getattr(event, name)) for name in names)
    ]
    tag = event.__struct_config__.tag
    return [tag, *plain(fields)]


def token_ids(seed: int, start: int, count: int) -> np.ndarray:
    """Tokens [start, start + count) of a response."""
    return ((seed % 8191 + np.arange(start, start + count) * 31) % 997).astype(np.int32)


def token_logprobs(seed: int, start: int, count: int) -> np.ndarray:
    """Log-probabilities of them, exact in binary."""
    return (-((seed % 127 + np.arange(start, start + count)) % 32) / 16.0).astype(np.float32)


def prompt_at(index: int) -> Prompt:
    """The prompt at a place of the stream; lengths vary."""
    ids = np.arange(2, 5 + index * 7 % 11, dtype=np.int32)
    return Prompt(id=f"p{index}", index=index, text=f"prompt {index}", ids=ids, answer="4")


def held_out(index: int) -> Prompt:
    """A prompt of an evaluation."""
    ids = np.arange(4, 9 + index, dtype=np.int32)
    return Prompt(id=f"h{index}", index=index, text=f"held out {index}", ids=ids, answer="7")


class Store:
    """Segments of a run: what replicas and scorers write there, and what is read of it."""

    def __init__(self, run: Path) -> None:
        self.reader = PayloadReader(segments_path(run))
        self._writer = SegmentWriter(segments_path(run), "fleet")

    def close(self) -> None:
        """Close all files."""
        self._writer.close()
        self.reader.close()

    def write(self, said: Said) -> TokensRef | None:
        """Write the tokens that a replica has got, or experts alone; None where it has neither."""
        if not said.count and said.experts is None:
            return None
        ids = token_ids(said.seed, said.start, said.count)
        piece = Piece(
            trajectory_id=said.id,
            epoch=said.epoch,
            start=said.start,
            spans=_spans(said),
            ids=ids.tobytes(),
            logprobs=token_logprobs(said.seed, said.start, said.count).tobytes(),
            mask=pack_mask(make_mask(ids)) if said.masked and said.count else None,
            experts=None if said.experts is None else pack_experts(make_experts(*said.experts)),
        )
        return tokens_ref(piece, self._writer.write(piece))

    def write_column(self, trajectory_id: str, name: str, values: TokenValues) -> ColumnRef:
        """Write numbers of a response's tokens."""
        piece = ColumnPiece(trajectory_id=trajectory_id, name=name, values=values)
        return ColumnRef(values.dtype, self._writer.write(piece))

    def piece(self, tokens: TokensRef) -> Piece:
        """Tokens that were written."""
        return self.reader.load([tokens.at]).piece(tokens.at)

    def column(self, ref: ColumnRef) -> TokenValues:
        """Numbers that were written."""
        return self.reader.load([ref.at]).column(ref).values

    def response(self, tokens: Sequence[TokensRef]) -> Payload:
        """Response that these make."""
        return self.reader.load(one.at for one in tokens).response(tokens)


def content_digest(response: Payload) -> str:
    """Digest that a tape has of a response: of its ids and log-probabilities, in however many pieces they lie."""
    return blake3(response.ids.tobytes() + response.logprobs.tobytes()).hexdigest(length=16)


def given(assignment: object, store: Store) -> Given:
    """An assignment in plain values."""
    sampling = assignment.sampling
    prefix = store.response(assignment.tokens).ids
    return Given(
        assignment.trajectory_id,
        assignment.epoch,
        assignment.group_id,
        assignment.kind.value,
        len(assignment.prompt_ids),
        len(prefix),
        crc32(prefix.tobytes()),
        sampling.seed,
        sampling.max_new_tokens,
        sampling.temperature == 0.0,
        assignment.version,
        assignment.used_s,
        assignment.routed,
    )


def progress(said: Said, store: Store) -> Progress:
    """Progress as a replica reports it, once its tokens are stored."""
    return Progress(
        trajectory_id=said.id,
        epoch=said.epoch,
        start=said.start,
        tokens=store.write(said),
        spans=_spans(said),
        finish_reason=None if said.end is None else FinishReason(said.end),
        cut=Cap.SECONDS if said.wall_cut else None,
        queue_s=said.queue_s,
        generate_s=said.generate_s,
        broken=None if said.broken is None else InterruptReason(said.broken),
        failure=DropReason.REFUSED if said.refusal else None,
        detail=said.refusal,
    )


def report(told: Told, store: Store, *, generated: int) -> ReplicaReport:
    """Report of a replica."""
    return ReplicaReport(
        replica=told.replica,
        status=EngineStatus(running=0, waiting=0, kv_used=0, kv_capacity=1, version=told.version),
        admissible=told.admissible,
        received=told.received,
        generated=generated,
        progress=tuple(progress(said, store) for said in told.said),
        loads=tuple(
            VersionLoaded(
                replica=told.replica,
                version=version,
                digest=f"digest{version}",
                elapsed_s=seconds,
                checksum=checksum,
            )
            for version, seconds, checksum in told.loads
        ),
        lost=told.lost,
    )


def _spans(said: Said) -> tuple[Span, ...]:
    return tuple(Span(*span) for span in said.spans)


def survey(look: Look) -> Survey:
    """Survey of a replica."""
    running, waiting = (
        tuple(
            TrajectorySummary(trajectory_id=name, context=context, length=length) for name, context, length in some
        )
        for some in (look.running, look.waiting)
    )
    return Survey(
        replica=look.replica,
        version=look.version,
        slots=look.slots,
        kv_used=look.kv_used,
        kv_capacity=look.kv_capacity,
        running=running,
        waiting=waiting,
        can_move=look.settled,
    )


def move_line(move: Move) -> list:
    """Trajectory, from where, where to, tokens computed anew."""
    return [move.trajectory_id, move.source, move.destination, move.prefill]


# ---- recovery


class Left:
    """State that a dead controller left in a run folder."""

    def __init__(self, run: Path, *, loses_checkpoint: bool = False) -> None:
        self._store = Store(run)
        self.state = recover(run)
        if loses_checkpoint and self.step:
            lost = self.step
            self.state = recover(run, exists=lambda checkpoint: checkpoint.step != lost)
        with reading(run) as connection:
            (published,) = connection.execute("SELECT coalesce(max(version), -1) FROM version").fetchone()
            self.highest_version = max((one.version for one in unpublished(connection)), default=published)

    @property
    def incarnation(self) -> int:
        """Number of the controller that starts now."""
        return self.state.incarnation

    @property
    def step(self) -> int:
        """Step of the checkpoint to go on from."""
        return self.state.checkpoint.step if self.state.checkpoint else 0

    @property
    def version(self) -> int | None:
        """Version whose weights that checkpoint has."""
        return self.state.checkpoint.version if self.state.checkpoint else None

    def write(self, tape: Tape) -> None:
        """Put down the whole state."""
        state = self.state
        tape.write(
            "recovered",
            state.incarnation,
            self.step,
            self.version,
            self.highest_version,
            state.next_prompt,
            state.next_evaluation,
            plain(state.next_sample),
        )
        for event in state.events:
            tape.write("to-append", *event_line(event))
        for entry in state.live:
            response = self._store.response(entry.tokens)
            columns = [self._store.column(ref) for ref in entry.columns.values()]
            tape.write(
                "left",
                entry.id,
                entry.group_id,
                entry.sample_index,
                entry.kind.value,
                entry.prompt.id,
                entry.status.value,
                len(response.ids),
                crc32(response.ids.tobytes()),
                span_rows(entry.token_spans),
                entry.epoch,
                entry.replica,
                entry.finish_reason.value if entry.finish_reason else None,
                number(entry.reward),
                next((len(values.array) for values in columns), None),
                number(entry.advantage),
                number(entry.advantage_scale),
                None if response.sampling_mask is None else len(response.sampling_mask.counts),
                None if response.routed_experts is None else response.routed_experts.positions,
            )


# ---- the controller's parts


class Listener:
    """The recorder of the scheduler: all goes to the tape, and on to the real ledger."""

    def __init__(self, ledger: Ledger, tape: Tape, store: Store) -> None:
        self.ledger, self.machine = ledger, ledger.machine
        self.tokens_of: Callable[[str], Sequence[TokensRef]] = lambda id: ()  # where a live response lies
        self._tape = tape
        self._store = store

    def append(self, event: msgspec.Struct) -> None:
        """Take an event."""
        told = event
        if isinstance(event, Finished):
            digest = content_digest(self._store.response(self.tokens_of(event.trajectory_id)))
            told = msgspec.structs.replace(event, digest=digest)
        line = event_line(told)
        (self._tape.later if line[0] in DELAYED else self._tape.write)(*line)
        self.ledger.append(event)

    def store_prompt(self, prompt: Prompt) -> None:
        """Take a prompt."""
        self._tape.write("prompt", prompt.id, len(prompt.ids))
        self.ledger.store_prompt(prompt)

    def store_tokens(self, trajectory_id: str, tokens: TokensRef, spans: tuple[Span, ...]) -> None:
        """Take where a piece of a response lies."""
        piece = self._store.piece(tokens)
        ids = np.frombuffer(piece.ids, np.int32)
        experts = None if piece.experts is None else unpack_experts(piece.experts)
        self._tape.write(
            "segment",
            trajectory_id,
            tokens.start,
            span_rows(spans),
            len(ids),
            int(ids.sum()) % 9973,
            None if piece.mask is None else len(unpack_mask(piece.mask).ids),
            None if experts is None else [experts.start, experts.positions],
        )
        self.ledger.store_tokens(trajectory_id, tokens, spans)

    def store_columns(self, trajectory_id: str, columns: Mapping[str, ColumnRef]) -> None:
        """Take where the scores of tokens lie."""
        (values,) = (self._store.column(ref).array for ref in columns.values())
        self._tape.write("token-rewards", trajectory_id, len(values), number(float(values.sum())))
        self.ledger.store_columns(trajectory_id, columns)


class Replicas(Protocol):
    """Answers of the script's replicas to rounds of repacking."""

    async def survey(self, replica: int) -> Look | None:
        """Tell what a replica has."""
        ...

    async def expect(self, replica: int, version: int, names: Sequence[str]) -> bool:
        """Promise to keep the version for these, or not."""
        ...

    def give_up(self, replica: int, names: Sequence[str]) -> None:
        """End these."""
        ...

    async def published(self, known: int) -> int:
        """Tell the newest version, once there is a newer one."""
        ...


class Batch:
    """Groups that the learner took, and what they are packed to."""

    def __init__(self, taken: object, store: Store) -> None:
        self.taken = taken
        self._store = store

    @property
    def is_empty(self) -> bool:
        """Say that no group has signal."""
        return not self.taken.trajectories

    def write(self, tape: Tape, plan: Plan) -> None:
        """Put down groups, trajectories with weights, bins and which rank gets what."""
        taken = self.taken
        groups = [[group.group_id, group.oldest_version] for group in taken.groups]
        weights = [[t.id, number(t.weight), number(t.advantage)] for t in taken.trajectories]
        reweighted = sorted(t.id for t in taken.trajectories if t.weight != 1.0)
        tape.write("batch", taken.version, groups, weights, reweighted)
        bins = fit_bins(taken.trajectories, max_tokens=plan.max_tokens) if plan.packs else []
        tape.write("bins", bin_ids(bins))
        if not self.is_empty:
            compares = plan.packs and plan.overlong is not None
            packed = self._fetched(self._packed(plan))
            _write_packed(tape, plan, packed, version=taken.version if plan.packs else 0, compares=compares)

    def _fetched(self, packed: Packed[TrajectoryRef]) -> Packed[Trajectory]:
        """The same with tokens, as ranks read them; a tape has masks and experts where they are stored alone."""
        every = [one for bundles in packed.bundles for bundle in bundles for one in bundle]
        complete, lost = complete_all(every, self._store.reader)
        assert not lost, lost
        plain = {
            id: msgspec.structs.replace(t, sampling_mask=None, routed_experts=None) for id, t in complete.items()
        }
        return Packed([[[plain[t.id] for t in one] for one in mine] for mine in packed.bundles], packed.weights)

    def _packed(self, plan: Plan) -> Packed[TrajectoryRef]:
        if not plan.packs:
            return pack(
                self.taken.trajectories,
                max_tokens=plan.max_tokens,
                ranks=plan.ranks,
                aggregation=Aggregation(plan.aggregation),
                attention_share=ATTENTION_SHARE,
            )
        bins = fit_bins(self.taken.trajectories, max_tokens=plan.max_tokens)
        terms = step_weights(
            bins,
            tokens_without_signal=self.taken.tokens_without_signal,
            aggregation=Aggregation(plan.aggregation),
            ages=self.taken.ages,
            constant=plan.cap,
            normalises=plan.advantage == "batch_std",
            columns=_columns(plan),
        )
        return deal_to_ranks(
            bins,
            terms,
            max_tokens=plan.max_tokens,
            ranks=plan.ranks,
            attention_share=ATTENTION_SHARE,
        )


def bin_ids(bins: Iterable[object]) -> list[list[str]]:
    """Ids of the trajectories that share a bin."""
    return [[entry.id for entry in item.trajectories] for item in bins]


def _columns(plan: Plan) -> tuple[Column, ...]:
    teacher = (Column(name=TEACHER_LOGPROBS),) if plan.teaches else ()
    reference = (Column(name=REFERENCE_LOGPROBS, source=Source.REFERENCE),) if plan.refers else ()
    return (*teacher, *reference)


def _write_packed(tape: Tape, plan: Plan, packed: object, *, version: int, compares: bool = False) -> None:
    terms = packed.weights
    tape.write(
        "terms",
        terms.aggregation.value,
        terms.num_trajectories,
        terms.num_trained,
        version,
        number(round(terms.advantage_mean, 9)),
        number(round(terms.advantage_scale, 7)),
        list(terms.groups) if compares else None,
    )
    for rank in range(plan.ranks):
        tape.write("rank", rank, [[t.id for t in bundle] for bundle in packed.bundles[rank]])
        tape.write("microbatches", rank, [_microbatch_line(batch) for batch in packed.microbatches(rank)])


def _microbatch_line(batch: object) -> list:
    loss = round(float(batch.loss_weights.astype(np.float64).sum()), 6)
    largest = round(float(np.abs(batch.advantages).max()), 5)
    support = None if batch.support is None else [int(batch.support.counts.sum()), len(batch.support.ids)]
    experts = None if batch.experts is None else int(batch.experts.sum())
    return [batch.lengths, loss, int(batch.staleness.sum()), largest, support, experts]


class Control:
    """One incarnation of the controller: scheduler, ledger, repacking. Build it inside its event loop."""

    def __init__(
        self,
        plan: Plan,
        run: Path,
        tape: Tape,
        *,
        score: Callable[[str, int, str], None],
        refer: Callable[[str, int], None],
    ) -> None:
        self._plan, self._tape, self._score, self._refer = plan, tape, score, refer
        self.clock = Clock()
        self.ledger = Ledger(run / LEDGER_NAME, host="host-1", clock=self.clock)
        self.store = Store(run)
        self.listener = Listener(self.ledger, tape, self.store)
        self.scheduler = TrajectoryScheduler(
            _settings(plan),
            prompt_at=prompt_at,
            recorder=self.listener,
            submit_for_scoring=self._submit_score,
            submit_for_columns={REFERENCE_LOGPROBS: self._submit_reference} if plan.refers else {},
            credit=Credit(group_advantages(Advantage(plan.advantage)), overlong_cost(plan.cap, plan.overlong)),
            clock=self.clock,
        )
        self.listener.tokens_of = lambda id: self.scheduler.state.live[id].tokens
        self._repacker = Repacker(plan.cap)
        self._migration: Migration | None = None
        self._evaluations: dict[int, asyncio.Future] = {}

    def _submit_score(self, trajectory: TrajectoryRef, prompt: Prompt) -> None:
        if trajectory.kind is Kind.TRAIN:
            self._repacker.finished(trajectory)
            if self._migration is not None:
                self._migration.finished(trajectory)
        self._score(trajectory.id, trajectory.length, prompt.id)

    def _submit_reference(self, trajectory: TrajectoryRef) -> None:
        self._refer(trajectory.id, trajectory.length)

    # ---- life

    async def start(self, left: Left | None) -> None:
        """Open the ledger; record that the incarnation begins; take up what is left."""
        await self.ledger.start()
        incarnation = left.incarnation if left else 1
        step = left.step if left and left.state.checkpoint else None
        drains = self._plan.on_new_weights == "drain"
        enforced = self._plan.max_staleness if "drop" in self._plan.policies else None
        started = RunStarted(
            incarnation=incarnation,
            host="host-1",
            pid=7,
            schema=1,
            config_digest="c0",
            drain=drains,
            max_staleness=enforced,
            resumed_step=step,
        )
        events = [started, *(left.state.events if left else ())]
        for event in events:
            self._tape.write(*event_line(event))
        self.ledger.append_all(events)
        await self.ledger.commit()
        if left is not None:
            await self.scheduler.restore(left.state)
            self.scheduler.continue_live()

    async def finish(self, incarnation: int) -> None:
        """Put down that the run ends by itself."""
        self.listener.append(RunEnded(incarnation, "finished"))
        account = self.ledger.accounting()
        for kind in (account.train, account.eval):
            dropped = {reason.value: count for reason, count in kind.dropped.items()}
            self._tape.write("account", kind.issued, kind.consumed, plain(dropped), kind.live)
        await self.ledger.commit()
        await self.ledger.close()
        self.store.close()

    def go_on(self) -> None:
        """Hand out training."""
        self.scheduler.admit()

    def pause(self) -> None:
        """Hand out nothing of training."""
        self.scheduler.pause()

    # ---- replicas

    def dispatch(self) -> dict[int, list[Given]]:
        """Assignments by replica."""
        dispatcher = self.scheduler.dispatcher
        handed = dispatcher.dispatch()
        while dispatcher.has_more:
            for replica, some in dispatcher.dispatch().items():
                handed.setdefault(replica, []).extend(some)
        return {replica: [given(item, self.store) for item in some] for replica, some in handed.items()}

    def adopt(self, replica: int) -> list[Given]:
        """Assignments for a replica that starts."""
        return [given(item, self.store) for item in self.scheduler.dispatcher.for_starting(replica)]

    def aborts(self) -> dict[int, list[str]]:
        """Trajectories that were dropped and that replicas still run."""
        return self.scheduler.state.take_aborts()

    def called_off(self) -> dict[int, list[str]]:
        """Trajectories that destinations need not expect any more."""
        return self.scheduler.moves.take_called_off()

    async def reported(self, told: Told) -> None:
        """Take in a report."""
        await self.scheduler.incoming.on_report(report(told, self.store, generated=self._generated(told)))

    def _generated(self, told: Told) -> int:
        """Training tokens that a replica says it generated: here those that are news of a live trajectory."""
        lengths: dict[str, int] = {}
        return sum(said.count for said in told.said if self._is_news(said, lengths))

    def _is_news(self, said: Said, lengths: dict[str, int]) -> bool:
        """True where it counts, after what the same report says of earlier tokens."""
        trajectory = self.scheduler.state.live.get(said.id)
        if trajectory is None or trajectory.kind is not Kind.TRAIN or trajectory.status is not Status.RUNNING:
            return False
        if (said.epoch, said.start) != (trajectory.epoch, lengths.get(said.id, trajectory.length)):
            return False
        lengths[said.id] = said.start + said.count
        return True

    def started(self, replica: int) -> None:
        """Put down that a replica runs."""
        self.listener.append(PartStarted(f"replica-{replica}", 7))

    async def lost(self, replica: int) -> None:
        """Take in that a replica died."""
        self.listener.append(PartCrashed(f"replica-{replica}", "killed"))
        await self.scheduler.incoming.on_replica_lost(replica)

    def retire(self, replica: int) -> None:
        """Send nothing more to a replica."""
        self.scheduler.views.retire(replica)

    async def deadlines(self) -> None:
        """Keep house."""
        await self.scheduler.incoming.enforce_deadlines()

    def in_flight(self) -> int:
        """Trajectories that are at replicas, as the dispatcher sees it."""
        return self.scheduler.views.in_flight

    # ---- scores and references

    async def scored(self, verdict: Verdict) -> None:
        """Take in a score."""
        columns: dict[str, TokenValues] = {}
        if verdict.by_token and verdict.value is not None:
            name = TEACHER_LOGPROBS if self._plan.teaches else TOKEN_REWARDS
            columns[name] = token_values(np.full(verdict.length, verdict.value / 4 - 0.5, np.float32))
        value, failure = verdict.value, None if verdict.failure is None else DropReason(verdict.failure)
        detail = "it raised" if failure else ""
        if self._plan.teaches and value is not None and not columns and verdict.id in self.scheduler.state.live:
            value, failure = None, DropReason.REWARD_FAILED  # what the scoring worker says of a missing column
            detail = "no score of each token from the teacher"
        await self.scheduler.incoming.on_score(
            Score(
                trajectory_id=verdict.id,
                value=value,
                columns={
                    name: self.store.write_column(verdict.id, name, values) for name, values in columns.items()
                },
                earned=earned_by(columns),
                elapsed_s=0.125,
                failure=failure,
                detail=detail,
            )
        )

    async def referred(self, id: str, length: int) -> None:
        """Take in what the reference model found."""
        logprobs = token_values(np.full(length, -1.5, np.float32))
        name = REFERENCE_LOGPROBS
        await self.scheduler.incoming.on_column(id, name, self.store.write_column(id, name, logprobs))

    def wanted(self, id: str) -> list[bool]:
        """Say if it is live, and if its score would tell anything."""
        return [self.scheduler.is_live(id)] * 2

    # ---- evaluations

    def evaluate(self, index: int, prompts: int, version: int | None) -> None:
        """Ask for an evaluation of so many prompts."""
        asked = self.scheduler.evaluations.request([held_out(n) for n in range(prompts)], version)
        self._evaluations[index] = asked

    def evaluated(self, step: int) -> list[list]:
        """Results that are there: number, version, accuracy; None where one is not known."""
        out = []
        for index, future in sorted(self._evaluations.items()):
            if future.done():
                del self._evaluations[index]
                out.append([index, *self._result(future, step)])
        return out

    def abandon(self) -> None:
        """Cancel all evaluations."""
        for index, future in sorted(self._evaluations.items()):
            self._tape.write("abandoned", index, future.cancel())
        self._evaluations = {}

    def _result(self, future: asyncio.Future, step: int) -> list:
        try:
            done = future.result()
        except EvaluationLostError:
            return [None, None]
        figures = set_figures(done.answers.values(), samples=1)
        if figures is None:
            return [done.version, None]
        self.listener.append(
            Evaluated(pass_id=done.id, set_name="", version=done.version, step=step, rl_s=1.0, figures=figures)
        )
        return [done.version, number(figures.mean.value)]

    # ---- learner

    @property
    def buffered(self) -> int:
        """Groups that are ready."""
        return len(self.scheduler.consumption.buffer)

    async def take(self, *, version: int) -> Batch | None:
        """Take a batch, if one is there."""
        asked = self.scheduler.next_batch(groups=self._plan.batch, version=version)
        taking = asyncio.create_task(asked)
        await asyncio.sleep(1e-4)
        if not taking.done():
            taking.cancel()
            await asyncio.wait([taking])
            return None
        return Batch(taking.result(), self.store)

    async def put_back(self, batch: Batch) -> None:
        """Return a batch that the learner died over."""
        await self.scheduler.consumption.put_back(batch.taken)

    async def commit(self, batch: Batch, *, step: int, incarnation: int) -> None:
        """Commit a step."""
        await self.scheduler.consumption.commit(batch.taken, step)
        tokens = sum(trajectory.length for trajectory in batch.taken.trajectories)
        count = len(batch.taken.trajectories)
        self.listener.append(
            Stepped(
                step=step,
                incarnation=incarnation,
                num_trajectories=count,
                num_tokens=tokens,
                loss=0.5,
                grad_norm=1.0,
                reward=0.25,
                elapsed_s=1.0,
            )
        )

    def publish(self, *, above: int) -> int:
        """Give new weights their version, beyond all that anybody spoke of."""
        version = max(above, self.ledger.newest_version) + 1
        self.scheduler.published(version)
        return version

    def published(self, version: int, *, step: int, parent: int | None, incarnation: int) -> None:
        """Put on record that weights are complete."""
        self.listener.append(
            VersionPublished(
                version=version,
                step=step,
                incarnation=incarnation,
                parent=parent,
                digest=f"digest{version}",
                num_bytes=10,
                stall_s=0.0,
            )
        )

    async def adopt_versions(self, *, step: int, incarnation: int) -> int:
        """Put on record what replicas have and a dead controller did not come to say; the newest version."""
        for orphan in self.ledger.unpublished():
            self.published(orphan.version, step=step, parent=None, incarnation=incarnation)
            self.scheduler.state.ages.record_version(orphan.version)
        return self.ledger.newest_version

    async def checkpoint(self, *, step: int, version: int) -> None:
        """Put on record a checkpoint."""
        self.listener.append(
            Checkpointed(step=step, version=version, path=f"checkpoints/step-{step}", stall_s=0.1, elapsed_s=0.4)
        )
        self.scheduler.consumption.checkpointed(step)
        await self.ledger.commit()

    async def roll_back(self, *, step: int) -> int:
        """Go back to the checkpoint of a step; how many trajectories are ready again."""
        for event in await undo_since(self.ledger, step, reason="learner_crashed"):
            self._tape.write("to-undo", *event_line(event))
        self.listener.append(RolledBack(step, "learner_crashed"))
        return await self.scheduler.consumption.roll_back(step)

    # ---- repacking

    def peers(self) -> list[tuple[int, list[int]]]:
        """Replicas by the version that they serve."""
        return [
            (version, sorted(view.index for view in some))
            for version, some in sorted(self.scheduler.views.by_version().items())
        ]

    def plan_moves(self, kind: str, looks: Sequence[Look], *, max_stall_s: float) -> list[list]:
        """Moves among replicas of one version."""
        return [
            move_line(move) for move in self._repacker.plan(kind, looks, self.scheduler, max_stall_s=max_stall_s)
        ]

    def seen(self, looks: Sequence[Look]) -> None:
        """End a round of plans."""
        self._repacker.seen(looks)

    def move(self, version: int, moves: Sequence[list]) -> list[tuple[int, list[str]]]:
        """Carry out moves that were planned; what sources are asked to give up."""
        moving = self.scheduler.dispatcher.move(version, [Move(*move) for move in moves])
        return list(moving.asked.items())

    def rounds(self, replicas: Replicas) -> Awaitable[None]:
        """Run the real rounds of repacking, until cancelled."""
        kind = self._plan.repack.removeprefix("migration-")
        self._migration = Migration(
            MigrationSettings(
                planner=kind,
                interval_s=self._plan.repack_s,
                max_stall_s=self._plan.max_stall_s,
                max_new_tokens=self._plan.cap,
            ),
            scheduler=self.scheduler,
            fleet=_Fleet(replicas),
            published=replicas.published,
            clock=self.clock,
        )
        each_s = per_sequence_s(ROOFLINE) if kind == "paper" else 0.0
        return self._migration.run(msgspec.structs.replace(SPEED, step_s_per_sequence=each_s))

    # ---- state

    def look(self) -> list:
        """Numbers of the moment."""
        scheduler, admission = self.scheduler, _admission(self._plan)
        newest = scheduler.state.newest_version
        return [
            scheduler.router.num_admitted > 0,
            len(self._versions_told()),
            len(scheduler.state.live),
            len(scheduler.state.groups),
            len(scheduler.consumption.buffer),
            scheduler.state.generated_tokens,
            newest,
            [
                admission.limit,
                admission.oldest(newest, scheduler.state.ages),
                admission.share(self._plan.replicas),
            ],
            self.peers(),
        ]

    def _versions_told(self) -> set[int]:
        """Versions that live training trajectories are known to have tokens of."""
        training = (one for one in self.scheduler.state.live.values() if one.kind is Kind.TRAIN)
        return {span.version for one in training for span in one.token_spans}

    def siblings(self) -> object:
        """Lengths that are finished beside each one that goes on."""
        state = self.scheduler.state
        running = (name for name, one in state.live.items() if one.finish_reason is None)
        return plain({name: sorted(beside) for name in running if (beside := state.finished_beside(name))})


class _Fleet:
    """The script's replicas as rounds of repacking know them."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self.expect = replicas.expect
        self.give_up = replicas.give_up

    async def survey(self, replica: int) -> Survey | None:
        look = await self._replicas.survey(replica)
        return None if look is None else survey(look)


def _settings(plan: Plan) -> ControlSettings:
    return ControlSettings(
        seed=plan.seed,
        replicas=plan.replicas,
        batch_per_replica=plan.takes,
        group_size=plan.group_size,
        sampling=SamplingParams(max_new_tokens=plan.cap, stop_ids=(1,)),
        without_signal=WithoutSignal(plan.without_signal),
        max_refill=math.inf,
        one_version=plan.on_new_weights == "drain",
        admission=_admission(plan),
        bound=StalenessBound(plan.max_staleness, tuple(StalePolicy(policy) for policy in plan.policies)),
        group_deadline_s=plan.deadline_s,
        min_group_survivors=plan.min_survivors,
        max_seconds=plan.max_seconds,
        packing=_packing(plan) if plan.packs else None,
    )


def _admission(plan: Plan) -> Admission:
    waits = "wait" in plan.policies
    return Admission(
        schedule=Schedule(plan.schedule),
        batch=plan.batch,
        capacity=plan.capacity,
        max_staleness=plan.max_staleness,
        wait=waits,
        publish_every=plan.publish_every,
    )


def _packing(plan: Plan) -> Packing:
    return Packing(
        max_tokens=plan.max_tokens,
        by_id=plan.by_id,
    )


# ---- planners and packers on their own


class Repacker:
    """Planners, both, with what they learn of a run."""

    def __init__(self, cap: int) -> None:
        self._remaining = RemainingTokens(cap)
        self._previous: dict[int, int] = {}

    def finished(self, trajectory: TrajectoryRef) -> None:
        """Learn from a response that ended."""
        self.ended(trajectory.length, capped=trajectory.finish_reason is FinishReason.LENGTH)

    def ended(self, length: int, *, capped: bool) -> None:
        """Learn from a length."""
        self._remaining.finished(length, capped=capped)

    def seen(self, looks: Sequence[Look]) -> None:
        """Remember the KV tokens of each."""
        self._previous |= {look.replica: look.kv_used for look in looks}

    def plan(
        self, kind: str, looks: Sequence[Look], scheduler: TrajectoryScheduler, *, max_stall_s: float
    ) -> list[Move]:
        """Moves by what the scheduler knows."""
        return self.moves(
            kind,
            looks,
            scheduler.state.finished_beside,
            hungry=scheduler.router.num_admitted > 0,
            max_stall_s=max_stall_s,
            growth=6,
        )

    def moves(
        self,
        kind: str,
        looks: Sequence[Look],
        siblings: Callable[[str], Sequence[int]],
        *,
        hungry: bool,
        max_stall_s: float,
        growth: int,
        roofline: int = ROOFLINE,
        per_token_s: float = SPEED.step_s_per_token,
        prefill_per_s: float = SPEED.prefill_tokens_per_s,
    ) -> list[Move]:
        """Moves of one planner."""
        self._remaining.update([length for look in looks for _, _, length in look.running])
        context = PlanningContext(
            speed=EngineSpeed(
                step_s=SPEED.step_s,
                step_s_per_sequence=per_sequence_s(roofline) if kind == "paper" else 0.0,
                step_s_per_token=per_token_s,
                prefill_tokens_per_s=prefill_per_s,
            ),
            forecast=GroupForecast(self._remaining, siblings),
            max_stall_s=max_stall_s,
            growth=growth,
            has_demand=hungry,
            previous_kv=self._previous,
        )
        return PLANNERS.get(kind)(context).plan([survey(look) for look in looks])


def per_sequence_s(roofline: int) -> float:
    """Seconds of a sequence in a decode step, from which the paper's planner derives this roofline batch."""
    return MARGIN * SPEED.step_s / (roofline - 0.5)


def made(
    id: str,
    length: int,
    *,
    prompt: int = 4,
    version: int = 0,
    advantage: float = 0.0,
    weight: float = 1.0,
    recorded: bool = False,
) -> Trajectory:
    """A finished trajectory."""
    group, _, index = id.partition(".")
    return Trajectory(
        id=id,
        prompt_id=f"p{group[1:]}",
        group_id=group,
        sample_index=int(index),
        kind=Kind.TRAIN,
        prompt_ids=np.arange(2, 2 + prompt, dtype=np.int32),
        response_ids=token_ids(length, 0, length),
        logprobs=token_logprobs(length, 0, length),
        loss_mask=np.arange(length) % 7 != 3,
        spans=(Span(version, 0, length),),
        finish_reason=FinishReason.STOP,
        reward=1.0,
        advantage=advantage,
        weight=weight,
        sampling_mask=make_mask(token_ids(length, 0, length)) if recorded else None,
        routed_experts=make_experts(0, prompt + length - 1) if recorded else None,
    )


def shares(shapes: Sequence[tuple[int, int, int]]) -> list[float | None]:
    """Costs of attention in models of these hidden sizes, layers and parameters."""
    return [number(attention_share(hidden_size=h, num_layers=n, num_parameters=p)) for h, n, p in shapes]


def packed_lines(tape: Tape, plan: Plan, trajectories: Sequence[Trajectory], *, version: int) -> None:
    """Put down how a whole step is packed."""
    bins = fit_bins(trajectories, max_tokens=plan.max_tokens)
    tape.write("fit", bin_ids(bins))
    ages = {made: version - made for made in range(version + 1)}
    terms = step_weights(bins, aggregation=Aggregation(plan.aggregation), ages=ages, constant=plan.cap)
    packed = deal_to_ranks(
        bins, terms, max_tokens=plan.max_tokens, ranks=plan.ranks, attention_share=ATTENTION_SHARE
    )
    _write_packed(tape, plan, packed, version=version)
