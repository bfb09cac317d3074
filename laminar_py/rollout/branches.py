"""Requests for a response that is a tree: the engine gets only the context of its last branch.

`rollout.running` calls it. A branch has its own seed, so two branches from one place differ, and a repeated
request draws the same tokens (`tests/environment/test_truth.py`).
"""

import msgspec

from laminar_py.records.engine import GenerateRequest
from laminar_py.records.spans import Span, context_of

_ODD = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, which spreads small numbers over all bits


def in_context(request: GenerateRequest, spans: tuple[Span, ...]) -> GenerateRequest:
    """Turn a request that continues a whole tree into a request with the context of its last branch alone.

    E.g. if the last 15 of 60 response tokens follow the first 41, the engine gets these 56 behind the prompt.
    """
    context, sampling = context_of(spans), request.sampling
    root, branch = context.parts[0][0], context.parts[-1][0]
    ids = request.prefix_ids[context.places]
    prompt, group = request.prompt_ids, request.group_id
    if not context.has_prompt:  # the branch begins with a prompt of its own, which no other shares
        count = next(span.end - span.start for span in spans if span.start == root)
        prompt, ids, group = ids[:count], ids[count:], f"{request.rid}/{root}"
    room = sampling.max_new_tokens - len(request.prefix_ids)
    return msgspec.structs.replace(
        request,
        group_id=group,
        prompt_ids=prompt,
        prefix_ids=ids,
        sampling=msgspec.structs.replace(
            sampling, max_new_tokens=len(ids) + room, seed=(sampling.seed + branch * _ODD) % 2**63
        ),
    )
