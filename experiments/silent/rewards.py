"""Rewards for the planted failures."""

import time
import zlib


def flaky(request):
    """Raise for a fifth of the responses; else 1 if the response is right."""
    if zlib.crc32(request.response.encode()) % 5 == 0:
        raise ValueError("the verifier crashed")
    return float(request.response.strip().endswith("#" + request.answer))


def constant(request):
    """Return the same reward for each response."""
    return 0.5


def length(request):
    """Return a reward that rises with the length of the response."""
    return len(request.response_ids) / 344


def slow(request):
    """Take longer than its time limit for a tenth of the responses; else 1 if the response is right."""
    if zlib.crc32(request.response.encode()) % 10 == 0:
        time.sleep(1)
    return float(request.response.strip().endswith("#" + request.answer))
