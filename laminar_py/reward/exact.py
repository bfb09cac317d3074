"""The reward `exact`: 1 for a response that ends by itself and whose last answer is the wanted one, else 0."""

import re

from laminar_py.config.section import ConfigError
from laminar_py.records.scoring import ScoringRequest
from laminar_py.records.trajectory import FinishReason


class ExactReward:
    """Compares the first group of the pattern's last match with the prompt's answer.

    With pattern `#(\\d)$` and answer `7` the response `1+6=7;#7` is worth 1; cut by a cap it is worth 0.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"reward.pattern={pattern!r}: not a regular expression ({error}); mend it") from None
        if not self._pattern.groups:
            raise ConfigError(f"reward.pattern={pattern!r}: has no group; put the answer in parentheses")

    def __call__(self, request: ScoringRequest) -> float:
        """1.0 or 0.0."""
        if request.finish_reason is not FinishReason.STOP:
            return 0.0
        matches = list(self._pattern.finditer(request.response))
        return float(bool(matches) and matches[-1].group(1) == request.answer)
