"""A model on a server scores given tokens, as a model in our own memory does."""

import asyncio
import dataclasses
import shutil

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from laminar_py.config.section import ConfigError
from laminar_py.data.tokenizer import load_tokenizer
from laminar_py.engines.model_sizes import read_sizes
from laminar_py.engines.sglang.scoring import ServedModel
from laminar_py.engines.sglang.server import SGLangServer
from laminar_py.learner.distributed import join_group, leave_group
from laminar_py.learner.reference import FrozenModel
from laminar_py.records.engine import EngineLostError
from laminar_py.records.spans import NEW_CONVERSATION, Span
from tests.builders import make_trajectory
from tests.engines.sglang.rig import make_spec
from tests.engines.sglang.scoring_server import falling, response_of, scoring_server
from tests.runs.runs import quickstart_model

TOLERANCE = 1e-5  # nats


def open_model(server, *, outage_s=0.0):
    return ServedModel(server.url, api_key=None, answer_s=5.0, pause_s=0.0, outage_s=outage_s)


def whole(item):
    return np.concatenate([item.prompt_ids, item.response_ids])


def test_responses_have_the_numbers_of_their_tokens_behind_their_prompts():
    items = [make_trajectory(f"g{i}.0", prompt=2 + i, response=5 + i, seed=i) for i in range(3)]
    with scoring_server(vocab=1000) as server:
        found = open_model(server).logprobs(items)
        [asked] = server.asked
    for item, logprobs in zip(items, found, strict=True):
        np.testing.assert_allclose(logprobs, response_of(whole(item), len(logprobs)), rtol=1e-6)
    assert asked["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}
    assert asked["logprob_start_len"] == [1, 2, 3]


def test_each_token_of_a_tree_is_scored_in_the_sequence_that_owns_it():
    """Two answers behind the same 6 tokens, and a conversation that begins anew."""
    spans = (Span(3, 0, 6), Span(3, 6, 9, follows=6), Span(3, 9, 13, follows=6), Span(3, 13, 16, follows=-1))
    assert spans[-1].follows == NEW_CONVERSATION
    item = replace(make_trajectory("g0.0", prompt=4, response=16), spans=spans)
    with scoring_server(vocab=1000) as server:
        [found] = open_model(server).logprobs([item])
    ids = whole(item)
    np.testing.assert_allclose(found[:9], response_of(ids[:13], 9), rtol=1e-6)
    np.testing.assert_allclose(found[9:13], response_of(np.concatenate([ids[:10], ids[13:17]]), 4), rtol=1e-6)
    np.testing.assert_allclose(found[14:], response_of(ids[17:], 2), rtol=1e-6)
    assert found[13] == 0.0


def test_a_call_that_fails_is_repeated_and_a_server_that_is_gone_is_lost():
    item = make_trajectory("g0.0", prompt=2, response=5)
    with scoring_server(vocab=1000) as server:
        model = open_model(server)
        server.failing = 2
        assert np.isfinite(model.logprobs([item])[0]).all()
        server.failing = 3
        with pytest.raises(EngineLostError, match=f"server {server.url}: answered 503 to generate"):
            model.logprobs([item])
    with pytest.raises(EngineLostError, match="generate failed"):
        model.logprobs([item])


def test_a_batch_waits_through_an_outage():
    item = make_trajectory("g0.0", prompt=2, response=5)
    with scoring_server(vocab=1000) as server:
        model = open_model(server, outage_s=60.0)
        server.failing = 9
        assert np.isfinite(model.logprobs([item])[0]).all()
        assert server.failing == 0


def test_a_scored_batch_is_kept_where_the_server_fails_behind_it():
    item = make_trajectory("g0.0", prompt=2, response=5)
    with scoring_server(vocab=1000) as server:
        model, before = open_model(server), server.version

        def scored_last(ids):
            server.failing, server.version = 3, "7"
            return falling(ids)

        server.score = scored_last
        assert np.isfinite(model.logprobs([item])[0]).all()
        assert server.failing == 0
        assert model.info.weight_version == before
        server.score = falling
        model.logprobs([item])
        assert model.info.weight_version == "7"


def test_a_number_that_is_none_is_not_finite_and_other_tokens_are_no_answer():
    item = make_trajectory("g0.0", prompt=2, response=5)
    with scoring_server(lambda ids: [None] * (len(ids) - 1), vocab=1000) as server:
        assert np.isnan(open_model(server).logprobs([item])[0]).all()
        server.vocab = int(item.response_ids[-1]) + 1  # it names the last id 0
        assert len(open_model(server).logprobs([item])[0]) == 5
        server.score = lambda ids: [-1.0] * len(ids[1:])
        server._scored = lambda ids, start: [(None, id + 1, None) for id in ids[start:]]
        with pytest.raises(EngineLostError, match=r"scored other tokens of g0\.0 than it was sent"):
            open_model(server).logprobs([item])


def test_another_version_of_the_weights_is_another_fingerprint():
    item = make_trajectory("g0.0", prompt=2, response=5)
    with scoring_server(vocab=1000) as server:
        model = open_model(server)
        before = model.fingerprint
        server.version = "7"
        model.logprobs([item])
        assert model.fingerprint != before


def test_a_token_that_the_model_lacks_is_refused_in_one_line():
    with scoring_server(vocab=61) as server:
        model = open_model(server)
        model.knows(60, after=[1])
        with pytest.raises(
            ConfigError, match=rf"^algorithm\.teacher={server.url}: generate was refused with 400"
        ) as e:
            model.knows(61, after=[1])
    assert "\n" not in str(e.value)


@pytest.fixture
def folder(tmp_path):
    """A folder with random weights and the quickstart's tokenizer."""
    torch.manual_seed(3)
    folder = tmp_path / "model"
    shutil.copytree(quickstart_model(), folder)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


@pytest.mark.sglang
async def test_a_server_gives_the_numbers_of_a_model_in_our_memory(tmp_path, folder):
    """In fp32 on the CPU, with the vocabulary's last id among the tokens."""
    vocab, tokenizer, text = read_sizes(folder).vocab_size, load_tokenizer(folder), "e-2;o*7;1x5?"
    items = [make_trajectory(f"g{i}.0", prompt=3 + i, response=9 + i, seed=i) for i in range(3)]
    items[0] = replace(items[0], response_ids=np.append(items[0].response_ids[1:], np.int32(vocab - 1)))
    spans = (Span(3, 0, 4), Span(3, 4, 7, follows=4), Span(3, 7, 11, follows=4))
    items.append(replace(make_trajectory("g9.0", prompt=3, response=11), spans=spans))
    mesh = join_group(str(tmp_path / "rendezvous"), rank=0, world_size=1)
    try:
        own = FrozenModel(folder, vocab_size=vocab, temperature=1.0, max_tokens=1000, mesh=mesh).logprobs(items)
    finally:
        leave_group()
    spec = make_spec(folder, tmp_path)
    with_weights = {**spec.flags, "load-format": "auto", "skip-tokenizer-init": False}
    async with SGLangServer(dataclasses.replace(spec, flags=with_weights)) as server:
        model = await asyncio.to_thread(ServedModel, server.url, api_key=server.api_key)
        served = await asyncio.to_thread(model.logprobs, items)
        assert await asyncio.to_thread(model.tokenize, text) == tokenizer.encode(text).tolist()
        await asyncio.to_thread(model.knows, vocab - 1, after=[1])
        with pytest.raises(ConfigError, match="refused with 400"):
            await asyncio.to_thread(model.knows, vocab, after=[1])
        assert await asyncio.to_thread(lambda: model.longest_input) >= 2000
    assert str(folder) in model.fingerprint
    for one, other in zip(own, served, strict=True):
        assert np.abs(one - other).max() < TOLERANCE
