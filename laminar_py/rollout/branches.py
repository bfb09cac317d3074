"""Requests of a response that is a tree: an engine gets the context of its end alone. Called by `rollout.running`.

Invariant: a branch draws numbers of its own, so one that goes on from where another did is not the same again, and
it draws the same wherever it is asked for once more.
"""

import msgspec

from laminar_py.records.engine import GenerateRequest
from laminar_py.records.spans import Span
from laminar_py.records.tree import context_of

_ODD = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: it spreads small numbers over all bits


def in_context(request: GenerateRequest, spans: tuple[Span, ...]) -> GenerateRequest:
    """A request that goes on with the whole response, which is a tree, as one with its context alone.

    E.g. of a response of 60 tokens whose last 15 follow its first 41: these 56 behind the prompt.
    """
    context, sampling = context_of(spans), request.sampling
    root, branch = context.parts[0][0], context.parts[-1][0]
    ids = request.prefix_ids[context.places]
    prompt, group = request.prompt_ids, request.group_id
    if not context.has_prompt:  # the words that it begins with are its prompt, which no other shares
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
