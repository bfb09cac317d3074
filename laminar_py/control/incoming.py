"""Arrivals at the controller: reports of replicas, scores, columns of frozen models, deadlines, crashes.

`control.scheduler` owns `Incoming`. Each arrival becomes events, which change the state of trajectories. Then the
trajectory waits for a replica (`control.waiting`), or its group closes and goes to `control.consumption`. No group
waits for another group.
"""

from collections.abc import Callable, Iterable, Mapping

from laminar_py.config.rollout import WithoutSignal
from laminar_py.control.consumption import Consumption
from laminar_py.control.evaluation import Evaluations
from laminar_py.control.groups import Credit, Group, has_signal
from laminar_py.control.state import ControlState
from laminar_py.control.waiting import WaitingQueue
from laminar_py.ledger.recovery import Recovered
from laminar_py.ledger.segments.salvage import RecordedProgress, Salvaged
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.events import Cut, Ready, Restamped
from laminar_py.records.host import Clock
from laminar_py.records.pieces import ColumnRef
from laminar_py.records.replica import Progress, ReplicaReport
from laminar_py.records.scoring import GroupRewards, Score
from laminar_py.records.spans import clip_spans, num_turns, replace_spans
from laminar_py.records.trajectory import (
    Cap,
    DropReason,
    FinishReason,
    InterruptReason,
    Kind,
    Prompt,
    Status,
    TrajectoryRef,
)

HOUSEKEEPING_S = 0.5  # between checks of deadlines, since no report or score triggers them
MIN_FAILURES = 32  # in a row before a run ends: an environment that fails now and then rarely fails so often
OUTAGE_S = 600.0  # longest outage of a service for environments that a run waits for


class ConsecutiveFailures:
    """Counts failed trajectories since the last finished one; calls `end` with a message when the run has to end.

    The run ends when at least `MIN_FAILURES` trajectories fail in a row, at least as many as a step has (`step`),
    and at least as many as are live. If any trajectory ever finished, the failures must also last `OUTAGE_S`.
    """

    def __init__(self, *, step: int, clock: Clock, end: Callable[[str], None]) -> None:
        self._least = max(MIN_FAILURES, step)
        self._clock = clock
        self._end = end
        self._count = 0
        self._since_s = 0.0
        self._any_finished = False

    def finished(self) -> None:
        """Note a finished trajectory, which resets the count."""
        self._count, self._any_finished = 0, True

    def failed(self, reason: DropReason, detail: str, *, in_flight: int) -> None:
        """Count a failure; end the run if there are too many in a row for `in_flight` live trajectories."""
        now_s = self._clock.now()
        if not self._count:
            self._since_s = now_s
        self._count += 1
        waits = self._any_finished and now_s - self._since_s < OUTAGE_S
        if self._count >= max(self._least, in_flight) and not waits:
            self._end(
                f"{self._count} trajectories in a row failed ({reason}), the last: {detail}; fix the cause and"
                " --resume"
            )


class Incoming:
    """Turns arrivals into events, queues interrupted trajectories again, and closes groups."""

    def __init__(
        self,
        state: ControlState,
        *,
        waiting: WaitingQueue,
        evaluations: Evaluations,
        consumption: Consumption,
        submit_for_scoring: Callable[[TrajectoryRef, Prompt], None],
        submit_for_columns: Mapping[str, Callable[[TrajectoryRef], None]],
        credit: Credit,
        clock: Clock,
        on_rewards: Callable[[GroupRewards], None],
        on_failing: Callable[[str], None],
    ) -> None:
        self._state = state
        self._waiting = waiting
        self._evaluations = evaluations
        self._consumption = consumption
        self._submit_score = submit_for_scoring
        self._submit_for_columns = submit_for_columns
        self._credit = credit
        self._clock = clock
        self._on_rewards = on_rewards
        step = state.settings.admission.batch * state.settings.group_size
        self._failures = ConsecutiveFailures(step=step, clock=clock, end=on_failing)

    # ---- replicas

    async def on_report(self, report: ReplicaReport) -> None:
        """Record a replica's loads, the progress of its trajectories, their lost versions, and its free places."""
        state = self._state
        for load in report.loads:
            state.record(load)
        for progress in report.progress:
            trajectory = state.live.get(progress.trajectory_id)
            if trajectory is not None and trajectory.accepts(progress):
                await self._on_progress(report.replica, trajectory, progress)
        for trajectory_id in report.lost:
            trajectory = state.live.get(trajectory_id)
            if trajectory is not None and trajectory.runs_on == report.replica:
                state.views.returned(report.replica, trajectory_id)
                await self._lose_version(trajectory)
        state.generated_tokens += report.generated
        state.views.reported(
            report.replica,
            version=report.status.version,
            admissible=report.admissible,
            received=report.received,
        )

    async def _on_progress(self, replica: int, trajectory: LiveTrajectory, progress: Progress) -> None:
        """Append a trajectory's new tokens; then handle a reported interruption, failure, loss or end."""
        state = self._state
        self._append_tokens(trajectory, progress)
        if progress.broken is InterruptReason.ENGINE_LOST:
            state.record(trajectory.cut_off())
            return
        if progress.broken is InterruptReason.NEW_WEIGHTS:  # the replica resumes it by itself
            state.record(trajectory.interrupted("new_weights"))
            state.record(trajectory.resumed(replica))
            return
        if progress.failure is None and not progress.lost and progress.finish_reason is None:
            return
        state.views.returned(replica, trajectory.id)
        if progress.failure is not None:  # the engine refuses the request, or the environment failed
            state.moves.ends(trajectory.id)
            state.drop([trajectory], progress.failure, progress.detail)
            self._failures.failed(progress.failure, progress.detail, in_flight=len(state.live))
            await self._close_with(trajectory)
        elif progress.lost:
            await self._drop_and_reissue(trajectory, DropReason.TOKENS_LOST, progress.detail)
        elif progress.finish_reason is FinishReason.ABORT:  # the replica handed it back
            moving = state.moves.destination(trajectory.id) is not None
            state.record(trajectory.interrupted("repacked" if moving else "returned"))
            self._waiting.append(trajectory)
        else:
            state.moves.ends(trajectory.id)
            self._finish(trajectory, progress)

    def _append_tokens(self, trajectory: LiveTrajectory, progress: Progress) -> None:
        """Append a trajectory's new tokens and times; record `Restamped` if the engine corrected earlier versions.

        The first token of a pass that has no version yet gives the pass its version.
        """
        trajectory.here_s = progress.generate_s - progress.queue_s
        trajectory.environment_s += progress.environment_s
        if progress.tokens is not None:
            spans = clip_spans(progress.spans, progress.start)
            self._state.recorder.store_tokens(trajectory.id, progress.tokens, spans)
        if progress.spans and progress.spans[0].start < progress.start:
            spans = replace_spans(trajectory.token_spans, progress.spans)
            if spans != trajectory.token_spans:
                self._state.record(Restamped(trajectory.id, spans))
        begun = trajectory.last_version if progress.begun is None else progress.begun
        if trajectory.kind is Kind.EVAL and self._evaluations.pass_of(trajectory).version is None:
            self._evaluations.pass_of(trajectory).version = begun

    def _finish(self, trajectory: LiveTrajectory, progress: Progress) -> None:
        """Record a response's end, and the cap that cut the response, if any; then queue the response for scoring.

        The first finished response of a group starts the group's deadline.
        """
        state = self._state
        if progress.cut is Cap.SECONDS:
            state.record(Cut(trajectory.id, Cap.SECONDS, state.settings.max_seconds or 0.0))
        elif progress.cut is Cap.TURNS:
            state.record(Cut(trajectory.id, Cap.TURNS, num_turns(trajectory.token_spans)))
        elif progress.finish_reason is FinishReason.LENGTH:
            state.record(Cut(trajectory.id, Cap.TOKENS, state.sampling(trajectory).max_new_tokens))
        state.record(trajectory.finished(progress))
        if state.settings.sends_earlier:
            state.earlier.add(trajectory)
        self._failures.finished()
        group = state.groups.get(trajectory.group_id)
        if group is not None and trajectory.trains:
            group.finished_lengths.append(trajectory.length)
        if group is not None and group.first_finished_s is None:
            group.first_finished_s = self._clock.now()
        self._submit(trajectory)

    def running_on(self, replica: int) -> dict[str, RecordedProgress]:
        """Return epoch and recorded length of each live trajectory that a replica runs, by id."""
        names = sorted(self._state.views.by_index[replica].in_flight)
        followed = ((name, self._state.live.get(name)) for name in names)
        return {
            name: RecordedProgress(trajectory.epoch, trajectory.length)
            for name, trajectory in followed
            if trajectory is not None and trajectory.status is Status.RUNNING
        }

    async def on_replica_lost(self, replica: int, salvaged: Iterable[Salvaged] = ()) -> None:
        """Append `salvaged` tokens to a crashed replica's trajectories, and queue these for other replicas."""
        self._state.moves.forget(replica)
        self._state.earlier.lost(replica)
        salvaged_by_id = {item.trajectory_id: item for item in salvaged}
        for trajectory_id in sorted(self._state.views.forget(replica)):
            trajectory = self._state.live.get(trajectory_id)
            if trajectory is not None and trajectory.status is Status.RUNNING:
                self._append_salvaged(trajectory, salvaged_by_id.get(trajectory_id))
                self._state.record(trajectory.interrupted("replica_crashed"))
                self._waiting.append_displaced(trajectory)

    def _append_salvaged(self, trajectory: LiveTrajectory, salvaged: Salvaged | None) -> None:
        """Append tokens that a crashed replica stored but did not report, if they continue the recorded tokens."""
        if salvaged is not None and salvaged.tokens.start == trajectory.length:
            self._append_tokens(
                trajectory,
                Progress(
                    trajectory_id=trajectory.id,
                    epoch=trajectory.epoch,
                    start=trajectory.length,
                    tokens=salvaged.tokens,
                    spans=salvaged.spans,
                    generate_s=max(0.0, salvaged.used_s - trajectory.used_s),
                ),
            )

    # ---- scores and columns of frozen models

    def _submit(self, trajectory: LiveTrajectory) -> None:
        """Queue a response for scoring if it has no score, and for the run's frozen models if it trains."""
        if trajectory.status is Status.FINISHED:
            self._submit_score(trajectory.as_ref(), trajectory.prompt)
        for submit in self._submit_for_columns.values() if trajectory.trains else ():
            submit(trajectory.as_ref())

    def _awaits_columns(self, members: Iterable[LiveTrajectory]) -> bool:
        """Whether some member still lacks the column of a frozen model."""
        return any(name not in member.columns for member in members for name in self._submit_for_columns)

    async def on_score(self, score: Score) -> None:
        """Record a response's score, or drop the response if its reward failed; a group's last score closes it."""
        trajectory = self._state.live.get(score.trajectory_id)
        if trajectory is None or trajectory.status is not Status.FINISHED:
            return
        if score.value is None:
            self._state.drop([trajectory], score.failure or DropReason.REWARD_FAILED, score.detail)
        else:
            if score.columns:
                self._state.recorder.store_columns(trajectory.id, score.columns)
            self._state.record(trajectory.scored(score))
        await self._close_with(trajectory)

    async def on_column(self, trajectory_id: str, name: str, logprobs: ColumnRef) -> None:
        """Note where a response's column of a frozen model is stored; a group's last one closes the group."""
        trajectory = self._state.live.get(trajectory_id)
        if trajectory is None:
            return
        trajectory.columns = trajectory.columns | {name: logprobs}
        group = self._state.groups[trajectory.group_id]
        if group.is_ready:
            await self._put(group)
        else:
            await self._close_if_complete(group)

    # ---- groups

    async def _close_with(self, trajectory: LiveTrajectory) -> None:
        """Close the group or pass of a scored or dropped trajectory, if no other member is pending."""
        if trajectory.kind is Kind.EVAL:
            self._evaluations.record_answer(trajectory)
        else:
            await self._close_if_complete(self._state.groups[trajectory.group_id])

    async def _close_if_complete(self, group: Group) -> None:
        """Close a group unless members are pending: compute advantages and put it in the buffer, or drop it.

        A group with too few scored members is dropped. So is a group without signal, unless
        `rollout.without_signal=train`; under `skip` it keeps its place in a step. A group that trains stays open
        until it has the columns of all frozen models.
        """
        if group.pending:
            return
        state, survivors = self._state, group.survivors
        if len(survivors) < state.settings.min_group_survivors:
            state.num_generating -= 1
            state.drop(survivors, DropReason.GROUP_LOST, f"{len(survivors)} survivors")
            del state.groups[group.id]
            await self._consumption.buffer.wake()  # a step may wait for this group as its last
            return
        rewards = tuple(member.reward or 0.0 for member in survivors)
        state.rewards = min(state.rewards[0], *rewards), max(state.rewards[1], *rewards)
        trains = state.settings.without_signal is WithoutSignal.TRAIN or has_signal(survivors)
        if trains and self._awaits_columns(survivors):
            return
        state.num_generating -= 1
        self._on_rewards(GroupRewards(group.prompt.index, group.prompt.id, rewards))
        if trains:
            for member, credit in zip(survivors, self._credit.assign(survivors), strict=True):
                state.record(Ready(member.id, credit.advantage, credit.scale, credit.roles))
            await self._consumption.put(group)
            return
        state.drop(survivors, DropReason.NO_SIGNAL, f"reward {survivors[0].reward:g}")
        if state.settings.without_signal is WithoutSignal.SKIP:
            await self._consumption.put_without_signal(group.id, survivors)
        else:
            del state.groups[group.id]
            state.refilled.append(rewards[0])
            await self._consumption.buffer.wake()

    async def _put(self, group: Group) -> None:
        """Put a group of READY members in the buffer, unless a member lacks the column of a frozen model."""
        if not self._awaits_columns(group.members.values()):
            await self._consumption.put(group)

    # ---- deadlines, lost tokens, lost versions

    async def enforce_deadlines(self) -> None:
        """Drop waiting trajectories whose version no replica will serve again, and pending members of late groups.

        A group is late `rollout.group_deadline_s` after its first finished response; then it closes.
        """
        for trajectory in self._waiting.take_unreachable():
            await self._lose_version(trajectory)
        state, now, deadline_s = self._state, self._clock.now(), self._state.settings.group_deadline_s
        if deadline_s is None:
            return
        for group in list(state.groups.values()):
            if group.overdue(now, deadline_s):
                for member in group.pending:
                    state.moves.ends(member.id)
                    state.abort(member)
                self._waiting.remove({member.id for member in group.pending})
                state.drop(group.pending, DropReason.GROUP_DEADLINE)
                await self._close_if_complete(group)

    async def drop_unscored(self) -> None:
        """Close groups that wait only for scores and would be too old after the next step.

        The scheduler calls this when a batch is full, so that a late score costs one response, not its group. A
        group with a response that still generates stays open: without its long responses it would favour short
        ones.
        """
        for group in list(self._state.groups.values()):
            late, survivors = group.pending, group.survivors
            if len(survivors) < self._state.settings.min_group_survivors:
                continue
            only_scores = all(member.status is Status.FINISHED for member in late)
            if late and only_scores and all(map(self._ages_out, late)) and any(map(self._ages_out, survivors)):
                self._state.drop(late, DropReason.STALE, "its score did not come in time")
                await self._close_if_complete(group)

    def _ages_out(self, member: LiveTrajectory) -> bool:
        """Whether a finished response would be dropped as stale after the next step."""
        settings, ages = self._state.settings, self._state.ages
        return settings.bound.weight(1 + ages.age_of(member.oldest_for_age)) is None

    async def drop_lost(self, lost: Mapping[str, str]) -> None:
        """Drop trajectories whose stored tokens cannot be read any more; `lost` maps their ids to the lost parts.

        A trajectory that is not READY is issued again. A READY trajectory leaves the buffer, or its group that
        waits for a frozen model. In the learner's current step it stays, since its tokens were read.
        """
        state = self._state
        self._waiting.remove(lost)
        self._consumption.drop_lost(lost)
        for trajectory_id, detail in lost.items():
            trajectory = state.live.get(trajectory_id)
            if trajectory is None:
                continue
            if trajectory.status is not Status.READY:
                state.moves.ends(trajectory.id)
                state.abort(trajectory)
                await self._drop_and_reissue(trajectory, DropReason.TOKENS_LOST, detail)
            elif self._awaits_columns([trajectory]):
                group = state.groups[trajectory.group_id]
                state.drop([trajectory], DropReason.TOKENS_LOST, detail)
                del group.members[trajectory.id]
                await self._put(group)

    async def _drop_and_reissue(self, trajectory: LiveTrajectory, reason: DropReason, detail: str) -> None:
        """Drop a trajectory that no replica can continue, then issue its prompt again or mark its pass as lost."""
        self._state.drop([trajectory], reason, detail)
        if trajectory.kind is Kind.EVAL:
            self._evaluations.pass_of(trajectory).lost = True
        elif trajectory.trains:
            self._waiting.append(self._state.issue_member(self._state.groups[trajectory.group_id]))
        await self._close_with(trajectory)

    async def _lose_version(self, trajectory: LiveTrajectory) -> None:
        """Drop a trajectory whose version no replica will serve again, then issue its prompt again.

        A pass member whose version a resumed run will publish again stays queued; its pass ends as lost now.
        """
        if self._state.settings.versions_return and trajectory.kind is Kind.EVAL:
            self._state.record(trajectory.interrupted("version_lost"))
            self._waiting.append(trajectory)
            evaluation = self._evaluations.pass_of(trajectory)
            evaluation.lost = True
            evaluation.finish()
            return
        self._state.num_version_lost += trajectory.trains
        await self._drop_and_reissue(
            trajectory, DropReason.VERSION_LOST, f"version {self._waiting.pin(trajectory)}"
        )

    # ---- a resumed run

    async def restore(self, recovered: Recovered, salvaged: Iterable[Salvaged]) -> None:
        """Fill an empty state with the trajectories that were live, and append `salvaged` tokens of replicas.

        Running trajectories are interrupted, and wait again. Members of a pass that the resumed run has not
        requested are dropped. The ledger has no columns of frozen models, so the models compute them again.
        """
        state = self._state
        salvaged_by_id = {item.trajectory_id: item for item in salvaged}
        state.next_prompt, state.ages = recovered.next_prompt, recovered.ages
        state.refilled, state.rewards = list(recovered.refilled), recovered.rewards
        self._consumption.restore_pool(recovered.consumed)
        self._evaluations.next_index = max(self._evaluations.next_index, recovered.next_evaluation)
        for trajectory in recovered.live:
            state.recorder.machine.adopt(trajectory)
            if trajectory.kind is Kind.EVAL and not self._evaluations.restore_member(trajectory):
                state.drop([trajectory], DropReason.RUN_ENDED)
                continue
            if trajectory.kind is Kind.TRAIN:
                next_sample = recovered.next_sample[trajectory.group_id]
                group = state.groups.setdefault(
                    trajectory.group_id,
                    Group(id=trajectory.group_id, prompt=trajectory.prompt, next_sample=next_sample),
                )
                group.members[trajectory.id] = trajectory
            if trajectory.status is Status.RUNNING:
                self._append_salvaged(trajectory, salvaged_by_id.get(trajectory.id))
                state.record(trajectory.interrupted("controller_crashed"))
            if trajectory.status in (Status.QUEUED, Status.INTERRUPTED):
                self._waiting.append(trajectory)
            else:
                self._submit(trajectory)
        for group in list(state.groups.values()):
            if group.is_ready:
                await self._put(group)
                continue
            state.num_generating += 1
            group.first_finished_s = self._clock.now() if len(group.pending) < len(group.members) else None
            members = group.members.values()
            group.finished_lengths = [member.length for member in members if member.finish_reason is not None]
            await self._close_if_complete(group)
