"""The verifier of tba: 1 where the operators make the target; the answer itself is on record, too."""

import re

from laminar_py import ScoringRequest
from laminar_py.records.scoring import Reward


def reached(request: ScoringRequest) -> Reward:
    """Score an answer such as `+-*+-*` to numbers and a target."""
    numbers, target = request.fields["numbers"], request.fields["target"]
    answer = request.response
    if not re.fullmatch(rf"[+*-]{{{len(numbers) - 1}}}", answer):
        return Reward(0.0)
    value = numbers[0]
    for operator, number in zip(answer, numbers[1:], strict=True):
        value = value + number if operator == "+" else value - number if operator == "-" else value * number
    return Reward(float(value == target), answer=answer)
