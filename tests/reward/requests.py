"""Responses to score."""

import msgspec
import numpy as np

from laminar_py.records.scoring import ScoringRequest
from laminar_py.records.trajectory import FinishReason


def make_request(response: str, *, index: int = 0, num_tokens: int = 1, **fields: object) -> ScoringRequest:
    """A response "g0.<index>" of so many tokens to a problem whose answer is 7; `fields` of the request differ."""
    request = ScoringRequest(
        trajectory_id=f"g0.{index}",
        prompt="prompt",
        response=response,
        answer="7",
        finish_reason=FinishReason.STOP,
        prompt_ids=np.array([3], np.int32),
        response_ids=np.ones(num_tokens, np.int32),
        logprobs=np.zeros(num_tokens, np.float32),
    )
    return msgspec.structs.replace(request, **fields)


def make_requests(*responses: str) -> list[ScoringRequest]:
    return [make_request(response, index=index) for index, response in enumerate(responses)]
