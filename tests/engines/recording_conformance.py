"""What every engine records of a mixture, as laws over a factory like those of `engine_conformance`.

Its engine serves a mixture of two experts to a token and records the experts. The judge is the router of the
Hugging Face model in fp32.
"""

import asyncio
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from laminar_py.records.engine import PauseMode
from laminar_py.records.pieces import RoutedExperts, join_experts
from tests.engines.engine_conformance import Factory, Response, caught, collect, make_request

PROMPT = (3, 4, 5)


def experts_of(response: Response) -> RoutedExperts:
    """Which come once, in the last delta."""
    found = [delta.routed_experts for delta in response.deltas]
    assert found[:-1] == [None] * (len(found) - 1)
    return found[-1]


@torch.inference_mode()
def own_choice(folder: Path, ids: list[int]) -> np.ndarray:
    """[positions, layers, 2] of all tokens but the last, as the model itself chooses; each pair sorted."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = model(torch.tensor([ids[:-1]]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(2).indices.sort().values for layer in logits], 1).numpy()


def assert_own_choice(folder: Path, response: list[int], experts: RoutedExperts) -> None:
    """They are the experts of every position, and those that the model chooses."""
    assert (experts.start, experts.positions) == (0, len(PROMPT) + len(response) - 1)
    np.testing.assert_array_equal(np.sort(experts.table, -1), own_choice(folder, [*PROMPT, *response]))


async def routed_experts_are_the_models_own_for_every_sibling(make: Factory) -> None:
    async with make() as rig:
        requests = [make_request(f"r{i}", group="g", length=30 + i, temperature=1.0, seed=i) for i in range(4)]
        for response in await asyncio.gather(*(collect(rig.engine, request) for request in requests)):
            assert_own_choice(rig.weights[0], response.ids, experts_of(response))


async def routed_experts_join_across_an_abort(make: Factory) -> None:
    async with make() as rig:
        stream = await caught(rig.engine, make_request(length=1000, temperature=1.0))
        await rig.engine.abort("r")
        partial = await stream.response()
        begun = experts_of(partial)
        request = make_request(prefix=partial.ids, length=len(partial.ids) + 20, temperature=1.0)
        rest = await collect(rig.engine, replace(request, routed=begun.positions))
        ids = [*partial.ids, *rest.ids]
        assert_own_choice(rig.weights[0], ids, join_experts([begun, experts_of(rest)]))


async def a_retracted_response_has_the_experts_of_all_its_tokens(make: Factory) -> None:
    async with make() as rig:
        stream = await caught(rig.engine, make_request(length=500, temperature=1.0))
        await rig.engine.pause(PauseMode.RETRACT)
        await rig.engine.resume()
        response = await stream.response()
        assert_own_choice(rig.weights[0], response.ids, experts_of(response))


RECORDING_LAWS = (
    routed_experts_are_the_models_own_for_every_sibling,
    routed_experts_join_across_an_abort,
    a_retracted_response_has_the_experts_of_all_its_tokens,
)
