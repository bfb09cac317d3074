"""Groups of samples of one prompt: membership, completion, stragglers. Pure; shared by the parts of `control`.

No group waits for another. A group is complete when its last member is scored or dropped; a deadline, where
one is set, counts from the first member that finished.
"""

from dataclasses import dataclass, field

from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.trajectory import Prompt, Status


@dataclass(slots=True, kw_only=True)
class Group:
    """The samples of one prompt, e.g. K = 8 members "g3.0" to "g3.7" and any that replaced a lost one."""

    id: str
    prompt: Prompt
    members: dict[str, LiveTrajectory] = field(default_factory=dict)
    next_sample: int = 0
    first_finished_s: float | None = None
    finished_lengths: list[int] = field(default_factory=list)  # tokens; kept, since each repack round asks for all

    @property
    def is_pending(self) -> bool:
        """True while a member is neither scored, nor further since all were, nor dropped."""
        return any(member.status not in SETTLED for member in self.members.values())

    @property
    def pending(self) -> list[LiveTrajectory]:
        """Members for which `is_pending` waits."""
        return [member for member in self.members.values() if member.status not in SETTLED]

    @property
    def survivors(self) -> list[LiveTrajectory]:
        """Scored members."""
        return [member for member in self.members.values() if member.status is Status.SCORED]

    @property
    def is_ready(self) -> bool:
        """True where every member is READY, as in a group that a resumed run takes up."""
        return all(member.status is Status.READY for member in self.members.values())

    def overdue(self, now: float, deadline_s: float) -> bool:
        """True where its deadline has passed with members still pending."""
        if self.first_finished_s is None:
            return False
        return now - self.first_finished_s > deadline_s and self.is_pending


SETTLED = frozenset({Status.SCORED, Status.READY, Status.CONSUMED, Status.DROPPED})
