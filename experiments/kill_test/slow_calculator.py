"""A calculator that takes its time, can be saved, and writes down every turn that it has answered."""

import asyncio
import json
import random
import re
import uuid
from pathlib import Path

from laminar_py.environment.protocol import Answer, End, Observation, Problem
from laminar_py.environment.tools.calculator import calculator

CALL = re.compile(r"<calculator>(.*?)</calculator>")
MEDIAN_S, SIGMA = 0.1, 1.0


class SlowCalculator:
    """The counterpart of tool_calculator's model, log-normal in its latency."""

    def __init__(self, log: str) -> None:
        self._log = Path(log)
        self._name, self._turn = uuid.uuid4().hex, 0

    def reset(self, problem: Problem) -> Observation:
        """Say nothing."""
        return Observation()

    async def step(self, action: str) -> Answer:
        """The result of the first call of a turn; one without a call is the last."""
        self._turn += 1
        await asyncio.sleep(random.lognormvariate(0.0, SIGMA) * MEDIAN_S)
        called = CALL.search(action)
        answer: Answer = Observation(f"<result>{_result(called[1])}</result>") if called else End()
        with self._log.open("a") as file:
            file.write(f"{self._name} {self._turn}\n")
        return answer

    def snapshot(self) -> bytes:
        """Its name and turn."""
        return json.dumps([self._name, self._turn]).encode()

    def restore(self, state: bytes) -> None:
        """Go on from there."""
        self._name, self._turn = json.loads(state)


def _result(expression: str) -> str:
    try:
        return calculator(expression)
    except Exception as error:  # noqa: BLE001 - whatever it says is for the model
        return str(error)[:40]
