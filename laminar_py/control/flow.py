"""Every live trajectory on its way from issue to the buffer: dispatch, reports, scores, groups.

Owned by the runtime's controller (or the simulator), which brings replica reports and scores in and carries
assignments out. Owns no process and no socket. Invariant (law 1): each change of a trajectory goes through its
`Lifecycle` and is recorded in the same call, so issued = consumed + dropped + live.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from laminar_py.config.rollout import WithoutSignal
from laminar_py.control.book import Book, FlowSettings, Recorder
from laminar_py.control.consumption import Consumption
from laminar_py.control.dispatcher import Dispatcher, ReplicaView
from laminar_py.control.evaluation import Evaluation, Evaluations
from laminar_py.control.groups import Group
from laminar_py.control.lifecycle import DISPATCHABLE, Lifecycle
from laminar_py.control.moves import Moves, Round
from laminar_py.control.probes import Probes
from laminar_py.control.staleness import Admission, StalenessBound
from laminar_py.control.waiting import Line
from laminar_py.ledger.recovery import LiveTrajectory, Recovered
from laminar_py.records.codec import FloatArray
from laminar_py.records.events import Cut, VersionLoaded
from laminar_py.records.protocols import Clock
from laminar_py.records.replica import Assignment, Move, Progress, ReplicaReport
from laminar_py.records.scoring import Score
from laminar_py.records.spans import clip_spans
from laminar_py.records.trajectory import Break, DropReason, FinishReason, Kind, Prompt, Status, Trajectory


class Flow:
    """Dispatches, follows, scores and groups trajectories; `consumption` hands ready groups to the learner."""

    def __init__(
        self,
        *,
        settings: FlowSettings,
        prompt_at: Callable[[int], Prompt],
        recorder: Recorder,
        submit_score: Callable[[Trajectory, Prompt], None],
        advantages: Callable[[Sequence[float]], tuple[FloatArray, float]],
        dispatcher: Dispatcher,
        admission: Admission,
        bound: StalenessBound,
        clock: Clock,
        submit_reference: Callable[[Trajectory], None] | None = None,
        length_cost: Callable[[int], float] = lambda length: 0.0,
    ) -> None:
        self.book = Book(settings, recorder)
        self.consumption = Consumption(self.book, bound)
        self.dispatcher = dispatcher
        self.moves = Moves()
        self.newest_version = -1  # that the learner published
        self.admitting = False  # training trajectories are handed out, and new ones issued
        self.continuing = False  # those that are live are handed out
        self.generated_tokens = 0  # of training, in this incarnation
        self._settings = settings
        self._evaluations = Evaluations(self.book)
        self._probes = Probes(
            share=settings.probe_share, most=settings.max_probes, recorder=recorder, submit_score=submit_score
        )
        self._admission = admission
        self._prompt_at = prompt_at
        self._submit_score = submit_score
        self._submit_reference = submit_reference  # None: there is no stage for the reference model
        self._advantages = advantages
        self._length_cost = length_cost  # reward that a response of so many tokens is worth less
        self._clock = clock
        self._next_prompt = 0
        self._line = Line(
            dispatcher=dispatcher,
            moves=self.moves,
            evaluations=self._evaluations,
            one_version=settings.one_version,
            may_go=self._may_go,
            place_for_one=lambda: self._place_for(1),
            place_for_orphan=lambda: self._place_for(1) or dispatcher.least_loaded(at_least=self._oldest),
        )
        self._aborts: dict[int, list[str]] = {}
        self._generating = 0  # groups that are not ready yet

    # ---- out: assignments

    def dispatch(self) -> dict[int, list[Assignment]]:
        """What to hand to which replica now: orphans first, then those that wait, then new groups."""
        out: dict[int, list[Assignment]] = {}
        self._line.extend(self._evaluations.start(self.dispatcher.idle()))
        for lifecycle, replica, pin in self._line.leave():
            self._assign(lifecycle, replica, pin, out)
        if self.admitting:
            self._dispatch_new(out)
        return out

    def adopt(self, replica: int) -> list[Assignment]:
        """For a replica that starts: waiting trajectories whose versions nobody else serves, oldest first."""
        out: dict[int, list[Assignment]] = {}
        self._line.extend(self._evaluations.start(()))
        for lifecycle, pin in self._line.leave_for(self.dispatcher.num_starting()):
            self._assign(lifecycle, replica, pin, out)
        return sorted(out.get(replica, []), key=lambda assignment: assignment.version or 0)

    def take_aborts(self) -> dict[int, list[str]]:
        """Dropped trajectories that replicas still run, by replica; each is told once."""
        aborts, self._aborts = self._aborts, {}
        return aborts

    def _may_go(self, lifecycle: Lifecycle) -> bool:
        return lifecycle.kind is Kind.EVAL or self.admitting or self.continuing

    def _dispatch_new(self, out: dict[int, list[Assignment]]) -> None:
        for _ in range(self._admission.allowed(live=len(self.book.groups), generating=self._generating)):
            view = self._place_for(self._settings.group_size)
            if view is None:
                return
            for lifecycle in self._issue_group():
                self._assign(lifecycle, view.index, None, out)

    def _place_for(self, size: int) -> ReplicaView | None:
        groups = self._admission.share(len(self.dispatcher.views))
        return self.dispatcher.for_group(
            size,
            at_least=self._oldest,
            share=None if groups is None else groups * self._settings.group_size,
        )

    @property
    def _oldest(self) -> int | None:
        """Version that what begins now must have at least."""
        return self._admission.oldest(self.newest_version)

    def _assign(
        self, lifecycle: Lifecycle, replica: int, pin: int | None, out: dict[int, list[Assignment]]
    ) -> None:
        self.moves.arrives(lifecycle.id, replica, length=lifecycle.length, prefill=lifecycle.prefill)
        self.book.record(lifecycle.assign(replica))
        self.dispatcher.send(replica, lifecycle.id, pin=pin)
        out.setdefault(replica, []).append(lifecycle.assignment(pin))

    def move(self, version: int, planned: Sequence[Move]) -> Round:
        """Carry out what of a plan still holds.

        The destinations have promised to keep `version` for all of it.
        """
        moving = Round(version=version, open={})
        for move in planned:
            if self._may_move(move, version):
                moving.open[move.trajectory_id] = move.destination
                moving.planned[move.trajectory_id] = move.prefill
                moving.asked.setdefault(move.source, []).append(move.trajectory_id)
            else:
                self.moves.refuse(move.destination, move.trajectory_id)
        self.moves.begin(moving)
        return moving

    def _may_move(self, move: Move, version: int) -> bool:
        lifecycle = self.book.live.get(move.trajectory_id)
        return (
            lifecycle is not None
            and self._may_go(lifecycle)
            and lifecycle.status is Status.RUNNING
            and lifecycle.replica == move.source
            and lifecycle.version in (None, version)
            and self.moves.destination(move.trajectory_id) is None
            and self.dispatcher.serving(move.destination, version)
        )

    @property
    def hungry(self) -> bool:
        """Whether a replica that becomes free would get new prompts."""
        return (
            self.admitting and self._admission.allowed(live=len(self.book.groups), generating=self._generating) > 0
        )

    def is_live(self, trajectory_id: str) -> bool:
        """Whether it is neither consumed nor dropped."""
        return trajectory_id in self.book.live

    def awaits_score(self, trajectory_id: str) -> bool:
        """Whether a score would tell anything: it is live, or a probe."""
        return self.is_live(trajectory_id) or trajectory_id in self._probes

    def go_on(self) -> None:
        """Training is handed out, and new groups are issued."""
        self.admitting = self.continuing = True

    def pause(self) -> None:
        """Nothing of training is handed out any more, and nothing moves."""
        self.admitting = self.continuing = False
        self.moves.end_all()

    def _issue_group(self) -> list[Lifecycle]:
        prompt = self._prompt_at(self._next_prompt)
        group = Group(id=f"g{self._next_prompt}", prompt=prompt)
        self._next_prompt += 1
        self.book.groups[group.id] = group
        self._generating += 1
        self.book.recorder.store_prompt(prompt)
        return [self.book.issue_member(group) for _ in range(self._settings.group_size)]

    def evaluate(self, prompts: Sequence[Prompt], version: int | None = None) -> "asyncio.Future[Evaluation]":
        """Answer `prompts` greedily under `version` (None: whatever the next idle replica serves).

        The future's result has the rewards; it fails with `EvaluationLostError` if the version is lost.
        """
        return self._evaluations.request(prompts, version)

    # ---- in: reports of replicas

    async def on_report(self, report: ReplicaReport) -> None:
        """Take in what a replica did."""
        for load in report.loads:
            self.book.record(
                VersionLoaded(
                    replica=report.replica,
                    version=load.version,
                    digest=load.digest,
                    elapsed_s=load.elapsed_s,
                    checksum=load.checksum,
                )
            )
        for progress in report.progress:
            lifecycle = self._on_progress(progress)
            if lifecycle is None:
                if self._probes.on_progress(progress):
                    self.dispatcher.returned(report.replica, progress.trajectory_id)
                continue
            if progress.broken is not None:
                self._on_break(report.replica, lifecycle, progress.broken)
            elif progress.refusal:
                await self._on_refusal(report.replica, lifecycle, progress.refusal)
            elif progress.finish_reason is not None:
                self._on_end(report.replica, lifecycle, progress)
        for trajectory_id in report.lost:
            await self._on_version_lost(report.replica, trajectory_id)
        self.dispatcher.reported(
            report.replica,
            version=report.status.version,
            admissible=report.admissible,
            received=report.received,
        )

    def _on_progress(self, progress: Progress) -> Lifecycle | None:
        """Whose progress it is, if that still counts."""
        lifecycle = self.book.live.get(progress.trajectory_id)
        if lifecycle is None or not lifecycle.accepts(progress):
            return None
        restamped = lifecycle.grow(progress)
        if lifecycle.kind is Kind.TRAIN:
            self.generated_tokens += len(progress.ids)
        elif lifecycle.version is not None:
            self._evaluations.runs_under(lifecycle, lifecycle.version)
        if len(progress.ids) or progress.routed_experts is not None:
            self.book.recorder.store_segment(
                lifecycle.id,
                progress.start,
                clip_spans(progress.spans, progress.start),
                progress.ids,
                progress.logprobs,
                sampling_mask=progress.sampling_mask,
                routed_experts=progress.routed_experts,
            )
        if restamped is not None:
            self.book.record(restamped)
        return lifecycle

    def _on_break(self, replica: int, lifecycle: Lifecycle, broken: Break) -> None:
        """Its stream was interrupted for new weights and goes on where it is, or broke off."""
        if broken is Break.CUT:
            self.book.record(lifecycle.cut_off())
            return
        self.book.record(lifecycle.interrupt("new_weights"))
        self.book.record(lifecycle.resume(replica))

    async def _on_refusal(self, replica: int, lifecycle: Lifecycle, words: str) -> None:
        """The engine never takes its request."""
        self.dispatcher.returned(replica, lifecycle.id)
        self.moves.ends(lifecycle.id)
        self.book.drop([lifecycle], DropReason.REFUSED, words)
        await self._settled(lifecycle)

    def _on_end(self, replica: int, lifecycle: Lifecycle, progress: Progress) -> None:
        """Its stream here is over: finished, or handed back."""
        self.dispatcher.returned(replica, lifecycle.id)
        if progress.finish_reason is FinishReason.ABORT:
            moving = self.moves.destination(lifecycle.id) is not None
            self.book.record(lifecycle.interrupt("repacked" if moving else "returned"))
            self._line.append(lifecycle)
        else:
            self.moves.ends(lifecycle.id)
            self._finish(lifecycle, progress)

    def _finish(self, lifecycle: Lifecycle, progress: Progress) -> None:
        if progress.wall_cut:
            self.book.record(Cut(lifecycle.id, "seconds", self._settings.max_seconds or 0.0))
        elif progress.finish_reason is FinishReason.LENGTH:
            self.book.record(Cut(lifecycle.id, "tokens", self._settings.sampling.max_new_tokens))
        self.book.record(lifecycle.finish(progress))
        group = self.book.groups.get(lifecycle.group_id)
        if group is not None and group.first_finished_s is None:
            group.first_finished_s = self._clock.now()
        self._submit_score(lifecycle.trajectory(), lifecycle.prompt)
        self._refer(lifecycle)

    async def _on_version_lost(self, replica: int, trajectory_id: str) -> None:
        lifecycle = self.book.live.get(trajectory_id)
        if self._probes.end(trajectory_id):
            self.dispatcher.returned(replica, trajectory_id)
        if lifecycle is None or lifecycle.replica != replica:
            return
        self.dispatcher.returned(replica, trajectory_id)
        await self._lose_version(lifecycle)

    async def _lose_version(self, lifecycle: Lifecycle) -> None:
        """Drop what can go on under no version it knows, and issue its prompt anew."""
        self.book.drop([lifecycle], DropReason.VERSION_LOST, f"version {self._line.pin(lifecycle)}")
        if lifecycle.kind is Kind.EVAL:
            self._evaluations.lose(lifecycle)
        else:
            self._line.append(self.book.issue_member(self.book.groups[lifecycle.group_id]))
        await self._settled(lifecycle)

    async def on_replica_lost(self, replica: int) -> None:
        """A replica died: what it had is interrupted, keeps its stored prefix and waits for another."""
        for trajectory_id in sorted(self.dispatcher.lost(replica)):
            self._probes.end(trajectory_id)
            lifecycle = self.book.live.get(trajectory_id)
            if lifecycle is not None and lifecycle.status is Status.RUNNING:
                self.book.record(lifecycle.interrupt("replica_died"))
                self._line.append_orphan(lifecycle)

    # ---- in: scores, and what the reference model finds

    async def on_score(self, score: Score) -> None:
        """Take in a verdict; it may complete its group."""
        lifecycle = self.book.live.get(score.trajectory_id)
        if lifecycle is None or lifecycle.status is not Status.FINISHED:
            self._probes.on_score(score)
            return
        if score.value is None:
            self.book.drop([lifecycle], score.failure or DropReason.REWARD_FAILED, score.detail)
        elif self._settings.teaches and score.token_values is None:
            self.book.drop([lifecycle], DropReason.REWARD_FAILED, "no score of each token from the teacher")
        else:
            if score.token_values is not None:
                self.book.recorder.store_token_rewards(lifecycle.id, score.token_values)
            self.book.record(lifecycle.score(score.value, score.token_values, score.elapsed_s))
        await self._settled(lifecycle)

    async def on_reference(self, trajectory_id: str, logprobs: FloatArray) -> None:
        """Take in the reference's log-probabilities [L] of a finished one, for which its group may have waited."""
        lifecycle = self.book.live.get(trajectory_id)
        if lifecycle is None:
            return
        lifecycle.reference_logprobs = logprobs
        group = self.book.groups[lifecycle.group_id]
        if group.is_ready:
            await self._put(group)
        elif not group.pending:
            await self._close(group)

    def _refer(self, lifecycle: Lifecycle) -> None:
        if self._submit_reference is not None and lifecycle.kind is Kind.TRAIN:
            self._submit_reference(lifecycle.trajectory())

    def _awaits_reference(self, members: Iterable[Lifecycle]) -> bool:
        return self._submit_reference is not None and any(m.reference_logprobs is None for m in members)

    async def _put(self, group: Group) -> None:
        """The learner may have it, once it has all that it needs."""
        if not self._awaits_reference(group.members.values()):
            await self.consumption.put(group)

    async def _settled(self, lifecycle: Lifecycle) -> None:
        if lifecycle.kind is Kind.EVAL:
            self._evaluations.settle(lifecycle)
            return
        group = self.book.groups[lifecycle.group_id]
        if not group.pending:
            await self._close(group)

    async def enforce_deadlines(self) -> None:
        """Drop what can never go on, and close groups whose stragglers are past the deadline."""
        for lifecycle in self._line.take_lost():
            await self._lose_version(lifecycle)
        now = self._clock.now()
        for group in list(self.book.groups.values()):
            if group.overdue(now, self._settings.group_deadline_s):
                for member in group.pending:
                    self.moves.ends(member.id)
                    if not self._probes.take(member) and member.replica is not None:
                        self.dispatcher.returned(member.replica, member.id)
                        self._aborts.setdefault(member.replica, []).append(member.id)
                self._line.drop_group(group.id)
                self.book.drop(group.pending, DropReason.GROUP_DEADLINE)
                await self._close(group)

    async def _close(self, group: Group) -> None:
        """All members are scored or dropped: advantages, or none. What has some waits for the reference model."""
        survivors, policy = group.survivors, self._settings.without_signal
        if len(survivors) < self._settings.min_group_survivors:
            self._generating -= 1
            self.book.drop(survivors, DropReason.GROUP_LOST, f"{len(survivors)} survivors")
            del self.book.groups[group.id]
            return
        rewards = [member.reward or 0.0 for member in survivors]
        teaches = max(rewards) > min(rewards) or policy is WithoutSignal.TRAIN
        if teaches and self._awaits_reference(survivors):
            return
        self._generating -= 1
        if not teaches:
            self.book.drop(survivors, DropReason.NO_SIGNAL, f"reward {rewards[0]:g}")
            if policy is WithoutSignal.SKIP:
                oldest = min(member.spans[0].version for member in survivors)
                await self.consumption.put_placeholder(group.id, oldest_version=oldest)
            else:
                del self.book.groups[group.id]
            return
        advantages, scale = self._advantages(
            [reward - self._length_cost(member.length) for reward, member in zip(rewards, survivors, strict=True)]
        )
        for member, advantage in zip(survivors, advantages.tolist(), strict=True):
            self.book.record(member.make_ready(advantage, scale))
        await self.consumption.put(group)

    # ---- after a crash

    async def restore(self, recovered: Recovered) -> None:
        """Take up what a dead controller left: partial responses wait for a replica, the rest where it was."""
        self._next_prompt = recovered.next_prompt
        self._evaluations.next_index = recovered.next_evaluation
        for entry in recovered.live:
            lifecycle = self._revive(entry)
            if lifecycle.kind is Kind.EVAL:
                self._evaluations.abandon(lifecycle)
                continue
            self.book.live[lifecycle.id] = lifecycle
            group = self.book.groups.setdefault(
                entry.group_id,
                Group(id=entry.group_id, prompt=entry.prompt, next_sample=recovered.next_sample[entry.group_id]),
            )
            group.members[lifecycle.id] = lifecycle
            self._take_up(lifecycle)
        for group in list(self.book.groups.values()):
            if group.is_ready:
                await self._put(group)
                continue
            self._generating += 1
            group.first_finished_s = self._clock.now() if len(group.pending) < len(group.members) else None
            if not group.pending:
                await self._close(group)

    def _revive(self, entry: LiveTrajectory) -> Lifecycle:
        response = entry.response
        return Lifecycle(
            id=entry.id,
            group_id=entry.group_id,
            sample_index=entry.sample_index,
            prompt=entry.prompt,
            kind=entry.kind,
            sampling=self.book.sampling(entry.id, entry.kind),
            status=entry.status,
            epoch=entry.epoch,
            replica=entry.replica if entry.status is Status.RUNNING else None,
            ids=[response.ids] if len(response.ids) else [],
            logprobs=[response.logprobs] if len(response.ids) else [],
            spans=response.spans,
            length=len(response.ids),
            finish_reason=entry.finish_reason,
            reward=entry.reward,
            token_rewards=entry.token_rewards,
            advantage=entry.advantage or 0.0,
            advantage_scale=1.0 if entry.advantage_scale is None else entry.advantage_scale,
            routed=0 if response.routed_experts is None else response.routed_experts.positions,
        )

    def _take_up(self, lifecycle: Lifecycle) -> None:
        if lifecycle.status is Status.RUNNING:
            self.book.record(lifecycle.interrupt("controller_died"))
        if lifecycle.status in DISPATCHABLE:
            self._line.append(lifecycle)
            return
        if lifecycle.status is Status.FINISHED:
            self._submit_score(lifecycle.trajectory(), lifecycle.prompt)
        self._refer(lifecycle)  # what it found before is on no record
