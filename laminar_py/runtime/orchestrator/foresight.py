"""Choice of the responses that scorers see while they still generate. Pure; owned by `orchestrator.scoring`.

Terms that work ahead, see `config.reward.ForesightedReward`, get the longest news first, few at a time: a long
response is seen every so often, a short one perhaps not before its end. Nothing depends on it but time.
"""

from collections.abc import Mapping
from heapq import nlargest

from laminar_py.config.reward import RewardConfig
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.evaluations import set_of
from laminar_py.records.scoring import NO_IDS, PartialResponse, Unfinished
from laminar_py.records.trajectory import Status

AT_A_TIME = 8  # responses, some 100 kB of ids


class Foresight:
    """Remembers how much of each trajectory was shown."""

    def __init__(self, reward: RewardConfig) -> None:
        self._reward = reward
        self._shown: dict[str, int] = {}  # tokens, of live trajectories
        self.is_wanted = reward.looks_ahead

    def choose(self, live: Mapping[str, LiveTrajectory]) -> list[Unfinished]:
        """Beginnings of those that have grown most since they were shown, at most `AT_A_TIME`."""
        self._shown = {name: shown for name, shown in self._shown.items() if name in live}
        news = {
            name: trajectory.length - self._shown.get(name, 0)
            for name, trajectory in live.items()
            if trajectory.status is Status.RUNNING and self._looks_ahead(trajectory)
        }
        chosen = [live[name] for name in nlargest(AT_A_TIME, news, key=lambda name: news[name]) if news[name]]
        self._shown |= {trajectory.id: trajectory.length for trajectory in chosen}
        return [
            Unfinished(
                tokens=trajectory.tokens,
                response=PartialResponse(
                    trajectory_id=trajectory.id,
                    task=trajectory.prompt.task,
                    set_name=set_of(trajectory.group_id),
                    prompt_ids=trajectory.prompt.ids,
                    response_ids=NO_IDS,
                ),
            )
            for trajectory in chosen
        ]

    def _looks_ahead(self, trajectory: LiveTrajectory) -> bool:
        terms = self._reward.of_task(trajectory.prompt.task, set_name=set_of(trajectory.group_id))
        return any(term.looks_ahead for term in terms)
