"""Advantages of a complete group: of its rewards or, in episodes of several roles, of those of each role.

Used by `control.closing`. Invariant: a response, or a role of it, is compared with nothing but the same of others
of its group; what one of them alone has teaches nothing. (`batch_std` compares in the whole step.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.codec import FloatArray
from laminar_py.records.returns import Returns, differ
from laminar_py.records.roles import RoleCredit


@dataclass(frozen=True, slots=True)
class MemberCredit:
    """Advantage of a response, what a unit of reward is in it, and the credit of its roles, if it has several."""

    advantage: float
    scale: float
    roles: tuple[RoleCredit, ...] = ()


@dataclass(frozen=True, slots=True)
class Credit:
    """Advantages of a group's returns; `advantages(returns)` gives their scale too: what a unit of reward is.

    `length_cost` is taken from the reward of a response of such a length.
    """

    advantages: Callable[[Sequence[Returns]], tuple[FloatArray, float]]
    length_cost: Callable[[int], float] = lambda length: 0.0

    def of(self, members: Sequence[LiveTrajectory]) -> list[MemberCredit]:
        """Credit of scored members, in their order."""
        returns = [member.returns_by_role() for member in members]
        found: list[dict[str, MemberCredit]] = [{} for _ in members]
        for role in {role: None for one in returns for role in one}:
            places = [place for place, one in enumerate(returns) if role in one]
            costs = [self.length_cost(members[place].length) for place in places]
            credited = self._among([returns[i][role].less(cost) for i, cost in zip(places, costs, strict=True)])
            for place, credit in zip(places, credited, strict=True):
                found[place][role] = credit
        return [_joined(member, by_role) for member, by_role in zip(members, found, strict=True)]

    def _among(self, returns: Sequence[Returns]) -> list[MemberCredit]:
        advantages, scale = self.advantages(returns)
        return [MemberCredit(advantage, scale) for advantage in advantages.tolist()]


def teaches(members: Sequence[LiveTrajectory]) -> bool:
    """True where tokens of these responses have different returns, role by role."""
    returns = [member.returns_by_role() for member in members]
    roles = {role for one in returns for role in one}
    return any(differ([one[role] for one in returns if role in one]) for role in roles)


def _joined(member: LiveTrajectory, by_role: dict[str, MemberCredit]) -> MemberCredit:
    if not member.roles:
        (credit,) = by_role.values()
        return credit
    roles = tuple(
        msgspec.structs.replace(one, advantage=by_role[one.role].advantage) if one.role in by_role else one
        for one in member.roles
    )
    return MemberCredit(fmean(credit.advantage for credit in by_role.values()), 1.0, roles)
