"""Environment that takes no time and notes when it has answered. Loaded by the process of environments.

It takes the time of `time.monotonic`, which is one clock for a whole host, as its last action in a turn.
"""

import json
import time
from pathlib import Path

from laminar_py.environment import Answer, End, Observation, Problem

WORD = "a"  # one token


class TimedEnvironment:
    """Writes `first` words, then `words` of them after each turn, and ends after so many `turns` of the model.

    All three are fields of the problem. At the end it writes its times to the file `out` of the problem.
    """

    def __init__(self) -> None:
        self._answered_s: list[float] = []

    def reset(self, problem: Problem) -> Observation:
        """Begin."""
        self._problem = problem
        return self._observe("first")

    def step(self, _: str) -> Answer:
        """Write the same after any turn."""
        if len(self._answered_s) == int(self._problem.fields["turns"]):
            Path(self._problem.fields["out"]).write_text(json.dumps(self._answered_s))
            return End(0.0)
        return self._observe("words")

    def _observe(self, field: str) -> Observation:
        observation = Observation(WORD * int(self._problem.fields[field]))
        self._answered_s.append(time.monotonic())
        return observation
