"""A reward that takes its time, as a verifier that compiles or calls a service does."""

import re
import time

from laminar_py import ScoringRequest

SECONDS = 0.02
ANSWER = re.compile(r"#(\d)$")


def score(request: ScoringRequest) -> float:
    """1 for the right answer, after a while."""
    time.sleep(SECONDS)
    found = ANSWER.search(request.response)
    return float(found is not None and found[1] == request.answer)
