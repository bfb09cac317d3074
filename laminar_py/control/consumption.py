"""Consumption takes batches out of the buffer for the learner, commits them, and undoes them after a crash.

`control.scheduler` owns it. A trajectory is consumed when its step is committed, not when the learner gets it; the
consumption can be undone until a checkpoint holds the step (law 1). A batch may also have groups that earlier
steps consumed: their replays are events of their own. A trajectory that is too old, or too long for
a microbatch, is dropped with an event (law 6).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from laminar_py.control.groups import Group
from laminar_py.control.replay import PooledGroup, ReplayPool
from laminar_py.control.state import ControlState
from laminar_py.learner.packing.buffer import Buffer, ReadyGroup
from laminar_py.learner.packing.layout import row_size
from laminar_py.ledger.recovery import ConsumedGroup
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.events import Consumed, RefillStopped, Replayed, Undone
from laminar_py.records.spans import num_sampled, versions_of
from laminar_py.records.trajectory import DropReason, FinishReason, Status, TrajectoryRef

log = logging.getLogger(__name__)

COMMITTED_AT_ONCE = 64  # trajectories, before the event loop gets to other work


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """Groups of one learner step, taken from the buffer or replayed, and their trajectories with loss weights."""

    version: int  # of the learner when it took the batch
    groups: list[ReadyGroup] = field(default_factory=list)
    replayed: list[PooledGroup] = field(default_factory=list)
    trajectories: list[TrajectoryRef] = field(default_factory=list)  # of `groups`, then of `replayed`
    wanted: int = 0  # groups that the step asked for, without replayed ones
    refilled: tuple[float, ...] = ()  # one reward of each group without signal that `refill` replaced
    spare: int = 0  # ready groups that it left in the buffer
    waited_s: float = 0.0  # for which the learner waited for it, without checkpoints and restarts before
    ages: dict[int, int] = field(default_factory=dict)  # staleness by version, see `records.ages`

    @property
    def staleness(self) -> list[int]:
        """[N] staleness of the oldest weights in each trajectory, in learner steps."""
        return [self.ages[trajectory.oldest_version] for trajectory in self.trajectories]

    @property
    def num_fresh(self) -> int:
        """Number of leading trajectories that no step has trained on before."""
        return len(self.trajectories) - sum(len(group.members) for group in self.replayed)

    @property
    def tokens_without_signal(self) -> list[int]:
        """Tokens of each response without signal that would be trained if its group had signal."""
        return [tokens for group in self.groups for tokens in group.tokens_without_signal]


class Consumption:
    """The buffer of ready groups, the consumptions since the last checkpoint, and the groups for replays."""

    def __init__(self, state: ControlState) -> None:
        self.buffer = Buffer()
        self._state = state
        self._packing = state.settings.packing
        self._undoable: list[tuple[int, LiveTrajectory]] = []  # (step, trajectory) since the last checkpoint
        settings = state.settings
        self._pool = ReplayPool(settings.replay, wanted=settings.replayed_groups, seed=settings.seed)

    async def put(self, group: Group) -> None:
        """Put the READY members of a group in the buffer, but drop members too long for a microbatch."""
        ready = [member for member in group.members.values() if member.status is Status.READY]
        refs = [(member, member.as_ref()) for member in ready]
        members = [self._masked(ref) for member, ref in refs if not self._drop_if_too_long(member, ref)]
        if not members:
            del self._state.groups[group.id]
            await self.buffer.wake()  # a step may wait for this group as its last
            return
        oldest = min(member.oldest_version for member in members)
        await self.buffer.add_group(group.id, members, oldest_version=oldest)

    async def put_without_signal(self, group_id: str, survivors: Sequence[LiveTrajectory]) -> None:
        """Put a group without signal in the buffer: it takes a place in a step, but nothing of it is trained."""
        oldest = min(member.oldest_for_age for member in survivors)
        tokens = tuple(0 if self._is_masked(m.finish_reason) else num_sampled(m.token_spans) for m in survivors)
        await self.buffer.add_group(group_id, [], oldest_version=oldest, tokens_without_signal=tokens)

    async def next_batch(
        self, *, groups: int, version: int, last_call: Callable[[], Awaitable[None]] | None = None
    ) -> StepBatch:
        """Wait for `groups` ready groups; return them, with replays, as a batch for a learner at `version`.

        Members beyond the staleness bound are dropped first. If too many groups had no signal
        (`rollout.max_refill`), the batch has fewer groups, or none. `last_call`, awaited once the buffer has
        enough groups, may make further groups ready. A cancelled wait takes no group out of the buffer.
        """
        while True:
            await self.buffer.wait_until(lambda: len(self.buffer) >= groups or self._ends_refill)
            self._drop_stale(groups)
            if last_call is not None and len(self.buffer) >= groups:
                await last_call()
                self._drop_stale(groups)
            if len(self.buffer) >= groups or self._ends_refill:
                batch = self._take(min(groups, len(self.buffer)), version)
                batch.wanted, batch.refilled = groups, tuple(self._state.refilled)
                batch.spare = len(self.buffer)
                self._state.refilled.clear()
                self._state.num_in_step = len(batch.groups)
                self._state.num_missing = groups - len(batch.groups) if batch.groups else 0
                return batch

    async def put_back(self, batch: StepBatch) -> None:
        """Return the groups of an untrained batch to the buffer, and its refilled rewards to the next batch."""
        self._state.num_in_step = self._state.num_missing = 0
        self._state.refilled[:0] = batch.refilled
        for group in batch.groups:
            await self.buffer.put_back(group)

    async def commit(self, batch: StepBatch, step: int) -> None:
        """Record that learner step `step` consumed or replayed the batch's trajectories, and close its groups.

        The event loop gets to other work in between, so the caller keeps the events in one ledger transaction
        (`Ledger.together`).
        """
        num_fresh, pairs = batch.num_fresh, zip(batch.trajectories, batch.staleness, strict=True)
        rows: dict[str, list[LiveTrajectory]] = {}
        for place, (trajectory, staleness) in enumerate(pairs, 1):
            if place % COMMITTED_AT_ONCE == 0:
                await asyncio.sleep(0)
            kind: type[Consumed] | type[Replayed] = Consumed if place <= num_fresh else Replayed
            if kind is Consumed:
                member = self._state.live[trajectory.id]
                self._undoable.append((step, member))
                rows.setdefault(member.group_id, []).append(member)
            self._state.record(
                kind(
                    trajectory_id=trajectory.id,
                    step=step,
                    version=batch.version,
                    staleness=staleness,
                    weight=trajectory.weight,
                )
            )
        self._pool.record(batch.replayed, step)
        for group in batch.groups:
            del self._state.groups[group.group_id]
            self._pool.add(
                PooledGroup(id=group.group_id, step=step, members=group.members, rows=rows.get(group.group_id, []))
            )
        self._state.num_in_step = self._state.num_missing = 0
        self._state.ages.record_step(learned=bool(batch.trajectories))

    def refill_stopped(self, batch: StepBatch, step: int) -> RefillStopped | None:
        """Return the event that `refill` left a batch with too few groups; None if it did not."""
        if len(batch.groups) == batch.wanted or not batch.refilled:
            return None
        worst, best = self._state.rewards
        differ = worst < best
        return RefillStopped(
            step=step,
            num_wanted=batch.wanted,
            num_taken=len(batch.groups),
            num_without_signal=len(batch.refilled),
            num_best=batch.refilled.count(best) if differ else 0,
            num_worst=batch.refilled.count(worst) if differ else 0,
            only_reward=None if differ else best,
        )

    def checkpointed(self, step: int) -> None:
        """Forget the consumptions up to `step`, which a checkpoint holds: they cannot be undone any more."""
        self._pool.checkpointed(step)
        self._undoable = [entry for entry in self._undoable if entry[0] > step]

    async def roll_back(self, step: int) -> int:
        """Undo consumption since the checkpoint of `step`; return how many trajectories are back in the buffer."""
        self._state.ages.record_rollback(step)
        self._pool.roll_back(step)
        undone, self._undoable = self._undoable, []
        groups: dict[str, Group] = {}
        for of_step, member in undone:
            self._state.record(Undone(member.id, of_step))
            group = groups.setdefault(member.group_id, Group(id=member.group_id, prompt=member.prompt))
            group.members[member.id] = member
        self._state.groups.update(groups)
        for group in groups.values():
            await self.put(group)
        return len(undone)

    def restore_pool(self, consumed: Iterable[ConsumedGroup]) -> None:
        """Fill an empty pool with groups of an earlier controller, in order of consumption.

        A group is replayed no more if it fits no microbatch of this config, or lacks a column of its loss.
        """
        columns, unfit = self._state.settings.scored_columns, []
        for group in consumed:
            rows = list(group.members)
            members = [self._masked(row.as_ref()) for row in rows]
            usable = not (any(map(self._excess, members)) or any(row.missing(columns) for row in rows))
            unfit += [] if usable else [group.id]
            self._state.recorder.machine.hold(rows)
            self._pool.add(
                PooledGroup(
                    id=group.id,
                    step=group.step,
                    members=members,
                    replays=list(group.replays),
                    rows=rows,
                    usable=usable,
                )
            )
        if unfit:
            why = "they exceed packer.max_tokens or lack a column that the loss needs"
            log.warning("%d groups are replayed no more, since %s: %s", len(unfit), why, ", ".join(unfit))

    # ---- choosing a batch

    @property
    def _ends_refill(self) -> bool:
        """Whether the step takes the ready groups although there are too few, since `refill` reached its limit.

        A schedule that issues for one step at a time waits for the groups that still generate, since they belong
        to this step. Under `async` they may belong to later steps, so the step does not wait.
        """
        state = self._state
        num_generating = len(state.groups) - len(self.buffer) - state.num_in_step
        return state.refill_exhausted and not (num_generating and state.settings.admission.by_batch)

    def _take(self, count: int, version: int) -> StepBatch:
        """Remove the oldest `count` groups from the buffer; return them and replays as a batch."""
        groups = self.buffer.first(count)
        if self._packing and self._packing.by_id:
            groups.sort(key=lambda group: (len(group.group_id), group.group_id))  # as they were issued
        self.buffer.remove_groups(groups)
        ages = self._state.ages
        replayed = self._pool.draw(ages.last_step + 1, age_of=ages.age_of) if groups else []
        trajectories = [t for group in groups for t in self._weighted(group)]
        trajectories += [member for group in replayed for member in group.members]
        by_version = {v: ages.age_of(v) for t in trajectories for v in versions_of(t.spans)}
        return StepBatch(
            version=version, groups=groups, replayed=replayed, trajectories=trajectories, ages=by_version
        )

    def _weighted(self, group: ReadyGroup) -> list[TrajectoryRef]:
        """Return a group's members, with the loss weights of their staleness."""
        pairs = [(item, self._state.settings.bound.weight(self._age(item))) for item in group.members]
        return [msgspec.structs.replace(item, weight=item.weight * (weight or 0.0)) for item, weight in pairs]

    # ---- dropped and masked trajectories

    def _masked(self, trajectory: TrajectoryRef) -> TrajectoryRef:
        """Return a trajectory, with loss weight 0 if a cap cut it and `algorithm.truncated=mask`."""
        if not self._is_masked(trajectory.finish_reason):
            return trajectory
        return msgspec.structs.replace(trajectory, num_trained=0, weight=0.0)

    def _is_masked(self, reason: FinishReason | None) -> bool:
        return self._state.settings.masks_truncated and reason is FinishReason.LENGTH

    def _drop_if_too_long(self, member: LiveTrajectory, ref: TrajectoryRef) -> bool:
        """Drop a member that fits no microbatch, and return whether it was dropped; the config makes this rare."""
        if detail := self._excess(ref):
            self._state.drop([member], DropReason.TOO_LONG, detail)
        return bool(detail)

    def _excess(self, ref: TrajectoryRef) -> str:
        """Return the tokens of a response that fits no microbatch, and the limit; "" if it fits.

        A tree is cut, so its longest sequence counts, unless the loss needs whole responses.
        """
        packing = self._packing
        if packing is None or ref.num_tokens <= packing.max_tokens:
            return ""
        paths = [path.num_tokens(len(ref.prompt_ids)) for path in ref.token_paths]
        num_tokens = max(paths) if packing.cuts else row_size(ref).tokens
        fits = num_tokens <= packing.max_tokens
        return "" if fits else f"{num_tokens} tokens, packer.max_tokens {packing.max_tokens}"

    def _drop_stale(self, count: int) -> None:
        """Drop stale members among the first `count` groups of the buffer."""

        def staleness(member: TrajectoryRef) -> str | None:
            age = self._age(member)
            return f"staleness {age}" if self._state.settings.bound.weight(age) is None else None

        self._drop_members(DropReason.STALE, staleness, most=count)

    def drop_lost(self, lost: Mapping[str, str]) -> None:
        """Drop buffered trajectories whose stored tokens are lost; `lost` maps trajectory ids to lost parts.

        A consumed group that lost tokens is replayed no more.
        """
        for group in self._pool.drop(lost):
            log.warning("group %s is replayed no more: tokens of it are lost", group)
        self._drop_members(DropReason.TOKENS_LOST, lambda member: lost.get(member.id), most=len(self.buffer))

    def _drop_members(
        self, reason: DropReason, detail_of: Callable[[TrajectoryRef], str | None], *, most: int
    ) -> None:
        """Drop each member for which `detail_of` gives a detail, among the buffer's first `most` groups.

        A group that lost its last member leaves the buffer, and the group behind it is among the first.
        """
        place = 0
        while place < min(most, len(self.buffer)):
            group = self.buffer[place]
            gone = {member.id: detail for member in group.members if (detail := detail_of(member)) is not None}
            for trajectory_id, detail in gone.items():
                self._state.drop([self._state.live[trajectory_id]], reason, detail)
            group.members = [member for member in group.members if member.id not in gone]
            if group.members or not gone:
                place += 1
            else:
                self.buffer.remove_groups([group])
                del self._state.groups[group.group_id]

    def _age(self, member: TrajectoryRef) -> int:
        """Return the staleness of a ready trajectory."""
        return self._state.ages.age_of(member.oldest_version)
