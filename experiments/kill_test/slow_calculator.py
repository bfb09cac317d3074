"""A calculator that takes its time, can be saved, and writes down every turn whose answer was heard.

An answer was heard if another turn follows it. So each turn writes down the one before it, and which time it was
that this was taken: a turn that was taken twice after its answer was heard stands there under two numbers.
"""

import asyncio
import json
import random
import re
import uuid
from pathlib import Path

from laminar_contrib.tools.calculator import calculator
from laminar_py import End, Observation, Problem
from laminar_py.environment.protocol import Answer

CALL = re.compile(r"<calculator>(.*?)</calculator>")
MEDIAN_S, SIGMA = 0.1, 1.0


class SlowCalculator:
    """The counterpart of tool_calculator's model, log-normal in its latency."""

    def __init__(self, log: str) -> None:
        self._log = Path(log)
        self._name, self._turn, self._taken = uuid.uuid4().hex, 0, ""

    def reset(self, problem: Problem) -> Observation:
        """Say nothing."""
        return Observation()

    async def step(self, action: str) -> Answer:
        """The result of the first call of a turn; one without a call is the last."""
        if self._turn:
            with self._log.open("a") as file:
                file.write(f"{self._name} {self._turn} {self._taken}\n")
        self._turn, self._taken = self._turn + 1, uuid.uuid4().hex
        await asyncio.sleep(random.lognormvariate(0.0, SIGMA) * MEDIAN_S)
        called = CALL.search(action)
        return Observation(f"<result>{_result(called[1])}</result>") if called else End()

    def snapshot(self) -> bytes:
        """Name, turn, and which time it was taken."""
        return json.dumps([self._name, self._turn, self._taken]).encode()

    def restore(self, state: bytes) -> None:
        """Go on from there."""
        self._name, self._turn, self._taken = json.loads(state)


def _result(expression: str) -> str:
    try:
        return calculator(expression)
    except Exception as error:  # noqa: BLE001 - its text is for the model
        return str(error)[:40]
