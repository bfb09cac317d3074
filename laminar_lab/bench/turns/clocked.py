"""Environment that takes no time and notes when it has answered. Loaded by the process of environments.

It takes the time of `time.monotonic`, which is one clock for a whole host, as its last action in a turn.
"""

import json
import time
from pathlib import Path

from laminar_py.environment import Answer, End, Observation, Problem

WORD = "a"  # one token


class ClockedEnvironment:
    """Says `first` words, then `words` of them after each turn, and ends after so many `turns` of the model.

    All three are fields of the problem; its answer names the file in `out` that has the times at the end.
    """

    def __init__(self, out: str) -> None:
        self._out = Path(out)
        self._answered_s: list[float] = []

    def reset(self, problem: Problem) -> Observation:
        """Begin."""
        self._problem = problem
        observation = Observation(WORD * int(problem.fields["first"]))
        self._answered_s.append(time.monotonic())
        return observation

    def step(self, _: str) -> Answer:
        """Say the same after any turn."""
        if len(self._answered_s) == int(self._problem.fields["turns"]):
            (self._out / self._problem.answer).write_text(json.dumps(self._answered_s))
            return End(0.0)
        observation = Observation(WORD * int(self._problem.fields["words"]))
        self._answered_s.append(time.monotonic())
        return observation
