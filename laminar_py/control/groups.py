"""Groups, the samples of one prompt: membership, completion, deadline, advantages. Pure; shared in `control`.

A group is complete when its last member is scored or dropped. Its deadline, if set, counts from its first finished
member. Advantages compare the rewards of a group's members, in episodes of several roles separately for each role
(`tests/control/test_credit.py`). Only `algorithm.advantage=batch_std` compares rewards across a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import msgspec

from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.codec import FloatArray
from laminar_py.records.credit import Returns, RoleCredit, returns_differ
from laminar_py.records.trajectory import Prompt, Status

PENDING = frozenset({Status.QUEUED, Status.RUNNING, Status.INTERRUPTED, Status.FINISHED})


@dataclass(slots=True, kw_only=True)
class Group:
    """The samples of one prompt, e.g. K = 8 members "g3.0" to "g3.7", and replacements of lost members."""

    id: str
    prompt: Prompt
    members: dict[str, LiveTrajectory] = field(default_factory=dict)  # by id
    next_sample: int = 0  # index of the next member
    first_finished_s: float | None = None  # on the scheduler's clock; None while no response has finished
    finished_lengths: list[int] = field(default_factory=list)  # tokens; each repack round reads them

    @property
    def pending(self) -> list[LiveTrajectory]:
        """Members that are still queued, running, interrupted or unscored."""
        return [member for member in self.members.values() if member.status in PENDING]

    @property
    def survivors(self) -> list[LiveTrajectory]:
        """Scored members."""
        return [member for member in self.members.values() if member.status is Status.SCORED]

    @property
    def is_ready(self) -> bool:
        """Whether every member is READY, as in a group that a resumed run restores."""
        return all(member.status is Status.READY for member in self.members.values())

    def overdue(self, now: float, deadline_s: float) -> bool:
        """Whether members are pending more than `deadline_s` after the first member finished."""
        if self.first_finished_s is None:
            return False
        return now - self.first_finished_s > deadline_s and bool(self.pending)


@dataclass(frozen=True, slots=True)
class MemberCredit:
    """Advantage of a response, advantage of one unit of reward, and credit of each of its roles."""

    advantage: float
    scale: float
    roles: tuple[RoleCredit, ...] = ()


@dataclass(frozen=True, slots=True)
class Credit:
    """Rule for the advantages of a group.

    `advantages(returns)` gives [K] advantages and their scale, the advantage of one unit of reward.
    `length_cost(length)` is subtracted from the reward of a response with `length` tokens.
    """

    advantages: Callable[[Sequence[Returns]], tuple[FloatArray, float]]
    length_cost: Callable[[int], float] = lambda length: 0.0

    def assign(self, members: Sequence[LiveTrajectory]) -> list[MemberCredit]:
        """Return the credit of each scored member, in order; advantages compare returns role by role."""
        returns = [member.returns_by_role() for member in members]
        found: list[dict[str, MemberCredit]] = [{} for _ in members]
        for role in {role: None for rewards in returns for role in rewards}:
            places = [place for place, rewards in enumerate(returns) if role in rewards]
            costs = [self.length_cost(members[place].length) for place in places]
            net = [returns[place][role].minus(cost) for place, cost in zip(places, costs, strict=True)]
            advantages, scale = self.advantages(net)
            for place, advantage in zip(places, advantages.tolist(), strict=True):
                found[place][role] = MemberCredit(advantage, scale)
        return [_joined(member, by_role) for member, by_role in zip(members, found, strict=True)]


def has_signal(members: Sequence[LiveTrajectory]) -> bool:
    """Whether these responses have different returns in some role, so that advantages are not all 0."""
    returns = [member.returns_by_role() for member in members]
    roles = {role for rewards in returns for role in rewards}
    return any(returns_differ([rewards[role] for rewards in returns if role in rewards]) for role in roles)


def _joined(member: LiveTrajectory, by_role: dict[str, MemberCredit]) -> MemberCredit:
    """Combine the credits of a member's roles: the mean advantage with scale 1, and each role's own advantage.

    A member without roles has one credit, which is returned as it is.
    """
    if not member.roles:
        (credit,) = by_role.values()
        return credit
    roles = tuple(
        msgspec.structs.replace(credit, advantage=by_role[credit.role].advantage)
        if credit.role in by_role
        else credit
        for credit in member.roles
    )
    return MemberCredit(fmean(credit.advantage for credit in by_role.values()), 1.0, roles)
