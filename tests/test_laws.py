"""Laws of docs/laws.md that need two rooms at once: engine, relay and learner on the very same weights."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from laminar_py.config.algorithm import Aggregation, AlgorithmConfig
from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import LearnerConfig, LoraConfig
from laminar_py.engines.local.engine import LocalEngine
from laminar_py.learner.model import policy_logprobs
from laminar_py.learner.packing.packer import pack
from laminar_py.learner.step import Learner
from laminar_py.records.engine import GenerateRequest, PauseMode, SamplingParams
from laminar_py.records.pieces import Recording, join_masks
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import FinishReason, Kind, MicroBatch, Trajectory
from laminar_py.relay.node import RelayNode
from laminar_py.relay.publisher import Publisher
from laminar_py.relay.sockets import generate_keys
from laminar_py.relay.subscriber import Subscriber
from tests.learner.builders import make_model_folder, make_sequences
from tests.learner.builders import pack as pack_sequences
from tests.stored import at_ranks

PATIENCE_S = 30.0


async def generate(engine: LocalEngine, index: int, **cut) -> Trajectory:
    """One sampled trajectory of random length, as the engine gives it."""
    prompt = np.arange(3, 6 + index % 4, dtype=np.int32)
    sampling = SamplingParams(max_new_tokens=5 + 3 * index, seed=index, **cut)
    request = GenerateRequest(
        rid=f"t{index}",
        group_id=f"g{index}",
        prompt_ids=prompt,
        prefix_ids=np.empty(0, np.int32),
        sampling=sampling,
    )
    deltas = [delta async for delta in engine.generate(request)]
    ids = np.concatenate([delta.ids for delta in deltas])
    logprobs = np.concatenate([delta.logprobs for delta in deltas])
    (version,) = {delta.version for delta in deltas}
    span = (Span(version, 0, len(ids)),)
    mask = np.ones(len(ids), np.bool_)
    supports = [delta.sampling_mask for delta in deltas if delta.sampling_mask is not None]
    trajectory = Trajectory(
        id=f"t{index}",
        prompt_id="p",
        group_id=f"g{index}",
        sample_index=0,
        kind=Kind.TRAIN,
        prompt_ids=prompt,
        response_ids=ids,
        logprobs=logprobs,
        loss_mask=mask,
        spans=span,
        finish_reason=FinishReason.LENGTH,
        reward=1.0,
    )
    return replace(trajectory, sampling_mask=join_masks(supports)) if supports else trajectory


async def through_relays(learner: Learner, root: Path) -> str:
    """Publish the learner's weights as version 1 and pull them from a leaf two hops away."""
    keys = generate_keys()
    nodes = [RelayNode("root", store=root / "0", keys=keys)]
    await nodes[0].start()
    for name in ("middle", "leaf"):
        nodes.append(RelayNode(name, store=root / name, keys=keys, parents=[nodes[-1].endpoint]))
        await nodes[-1].start()
    subscriber = Subscriber(nodes[-1].endpoint, "replica-0", keys)
    tasks = [asyncio.create_task(part.run()) for part in (*nodes, subscriber)]
    publisher = Publisher(root / "0", chunk_bytes=4096, adapter_config=learner.adapter_config())
    publisher.publish_sources(1, learner.sources(dtype=torch.float32, gather=False))
    published = await asyncio.to_thread(publisher.completed, 1)
    async with asyncio.timeout(PATIENCE_S):
        pulled = await subscriber.pull(await subscriber.wait_newer(-1))
        assert pulled.digest == published.digest, "law 3: what arrives is what was published"
        for part in (subscriber, *reversed(nodes)):
            await part.close()
        await asyncio.gather(*tasks)
    publisher.close()
    return pulled.path


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["all weights", "adapters"])
async def test_behaviour_logprobs_agree_with_the_learner_on_published_weights(tmp_path, lora):
    """Laws 3 and 4: learner -> relay tree -> engine -> packer -> segment -> learner, fp32 within 1e-4."""
    model = make_model_folder(tmp_path / "model")
    settings = LearnerConfig(lr=1e-2, lora=lora)
    learner = Learner(ModelConfig(path=model), settings, AlgorithmConfig(), temperature=1.0, seed=0)
    for seed in range(3):
        learner.step([pack_sequences(make_sequences(seed=seed), num_total=6)])
    weights = await through_relays(learner, tmp_path / "relays")
    engine = LocalEngine(model, max_batch=8, max_len=128, kv_capacity=1024)
    await engine.start()
    try:
        await engine.load_weights(Path(weights), 1)
        async with asyncio.timeout(PATIENCE_S):
            trajectories = await asyncio.gather(*(generate(engine, index) for index in range(12)))
    finally:
        await engine.close()
    packed = pack(trajectories, max_tokens=128, ranks=1, aggregation=Aggregation.TOKEN_MEAN, attention_share=0.01)
    [batches] = at_ranks(packed)
    assert len(batches) > 1
    for batch in batches:
        assert_equal_logprobs(learner, batch)


@pytest.mark.parametrize(
    "cut", [{"top_k": 9}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 20, "top_p": 0.8}], ids=str
)
async def test_with_a_cut_vocabulary_the_ratio_is_1_under_replay_and_far_from_it_without(tmp_path, cut):
    """Law 4 over what the tokens were drawn from; an interrupted stream goes on with its mask."""
    model = make_model_folder(tmp_path / "model")
    learner = Learner(ModelConfig(path=model), LearnerConfig(), AlgorithmConfig(), temperature=1.0, seed=0)
    room = {"max_batch": 8, "max_len": 128, "kv_capacity": 1024, "stream_interval": 3}
    engine = LocalEngine(model, record=(Recording.SAMPLING_MASK,), **room)
    await engine.start()
    try:
        await engine.load_weights(model, 1)
        generating = asyncio.gather(*(generate(engine, index, **cut) for index in range(12)))
        for _ in range(3):
            await asyncio.sleep(0.01)
            await engine.pause(PauseMode.RETRACT)
            await engine.resume()
        trajectories = await asyncio.wait_for(generating, PATIENCE_S)
    finally:
        await engine.close()
    packed = pack(trajectories, max_tokens=128, ranks=1, aggregation=Aggregation.TOKEN_MEAN, attention_share=0.01)
    without = []
    [batches] = at_ranks(packed)
    for batch in batches:
        assert_equal_logprobs(learner, batch)
        whole, _ = policy_logprobs(learner.model, replace(batch, support=None))
        gap = batch.behaviour_logprobs - whole.detach().numpy()
        without += np.exp(-gap[batch.loss_weights > 0]).tolist()
    assert np.mean(without) < 0.9, "the ratio without replay"


def assert_equal_logprobs(learner: Learner, batch: MicroBatch) -> None:
    with torch.no_grad():
        logprobs, _ = policy_logprobs(learner.model, batch)
    trained = batch.loss_weights > 0
    assert trained.sum() > 10
    np.testing.assert_allclose(logprobs.numpy()[trained], batch.behaviour_logprobs[trained], atol=1e-4)
