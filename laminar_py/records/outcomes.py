"""Rewards of a group of training as they were when it closed: told to the stream that its problem came from."""

import msgspec


class GroupRewards(msgspec.Struct, frozen=True):
    """Rewards of the responses to the prompt at a place, e.g. `GroupRewards(17, "p3", (1.0, 0.0, 1.0))`."""

    place: int  # in the stream
    prompt_id: str
    rewards: tuple[float, ...]  # of each response that was scored

    @property
    def differ(self) -> bool:
        """True where they are not all equal."""
        return min(self.rewards) < max(self.rewards)

    def solved(self, at: float) -> float:
        """Share of rewards from `at` on."""
        return sum(reward >= at for reward in self.rewards) / len(self.rewards)
