"""The verifier of countdown: evaluates the expression that a response ends on."""

import re

from laminar_py import ScoringRequest
from laminar_py.records.trajectory import FinishReason

TARGET = 24
MOST = 30  # no result may be larger, or negative
TRIAL = re.compile(r"\d+([+*-]\d+=(\d+|x))+")


def reached(request: ScoringRequest) -> float:
    """1 where the last trial uses the numbers of the problem in their order and makes 24, else 0."""
    if request.finish_reason is FinishReason.LENGTH or not request.response.endswith("!"):
        return 0.0
    trial = request.response[:-1].rpartition(";")[2]
    if not TRIAL.fullmatch(trial):
        return 0.0
    expression = re.sub(r"=(\d+|x)", "", trial)  # the results that the trial states do not count
    if [int(number) for number in re.findall(r"\d+", expression)] != request.fields["numbers"]:
        return 0.0
    return float(evaluate(expression) == TARGET)


def evaluate(expression: str) -> int | None:
    """Value of e.g. `7-3*2`, from left to right; None where a result is out of bounds."""
    first, *others = re.findall(r"[+*-]?\d+", expression)
    value = int(first)
    for step in others:
        number = int(step[1:])
        value = value + number if step[0] == "+" else value - number if step[0] == "-" else value * number
        if not 0 <= value <= MOST:
            return None
    return value
