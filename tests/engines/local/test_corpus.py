"""Finished responses are kept within bounds on memory, number and age."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.engines.local.corpus import (
    LEAST_TOKENS,
    MOST_RESPONSES,
    OLDEST,
    RESPONSE_BYTES,
    Corpus,
)
from laminar_py.engines.local.scheduler import Scheduler
from laminar_py.engines.local.spec import ModelSpec
from laminar_py.records.codec import IntArray
from tests.engines.engine_conformance import make_request
from tests.engines.local.test_engine import save_model


def tokens(length: int) -> IntArray:
    return np.arange(length, dtype=np.int32)


@pytest.mark.parametrize(("length", "most"), [(4, 2**20), (40, 2**20), (5000, 2**22)])
def test_memory_stays_below_the_bound(length, most):
    corpus = Corpus(most_bytes=most)
    tracemalloc.start()
    for number in range(2 * most // (4 * length + RESPONSE_BYTES)):
        corpus.add(f"g{number // 8}.{number % 8}", (number // 8).to_bytes(16), tokens(length), version=0)
    used, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert corpus.num_bytes <= most < corpus.num_bytes + 4 * length + RESPONSE_BYTES
    assert 0.3 * corpus.num_bytes < used <= peak <= most
    assert used / (len(corpus) * length) < 4 + RESPONSE_BYTES / length  # bytes per token


def test_the_oldest_response_goes_first_when_memory_is_full():
    corpus = Corpus(most_bytes=3 * (4 * 100 + RESPONSE_BYTES))
    for number, prompt in enumerate([b"a", b"b", b"a", b"c", b"b"]):
        corpus.add(f"r{number}", prompt, tokens(100 - number), version=0)
    found = {prompt: [len(text) for text in corpus.of(prompt)] for prompt in (b"a", b"b", b"c")}
    assert found == {b"a": [98], b"b": [96], b"c": [97]}
    corpus.add("huge", b"d", tokens(10**6), version=0)
    assert (len(corpus), corpus.num_bytes) == (0, 0)


def test_a_prompt_keeps_its_newest_responses_and_a_turn_replaces_the_one_before():
    corpus = Corpus()
    for number in range(40):
        corpus.add(f"r{number}", b"p", tokens(10 + number), version=0)
        corpus.add(f"probe{number}", b"p", tokens(LEAST_TOKENS - 1), version=0)
    assert [len(text) for text in corpus.of(b"p")] == list(range(50 - MOST_RESPONSES, 50))
    corpus.add("r39", b"p", tokens(60), version=0)
    assert [len(text) for text in corpus.of(b"p")] == [*range(50 - MOST_RESPONSES, 49), 60]


@given(additions=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3), st.integers(0, 20)), max_size=60))
def test_its_two_indexes_agree(additions):
    corpus = Corpus(most_bytes=5 * RESPONSE_BYTES)
    for version, (request, prompt, length) in enumerate(additions):
        corpus.add(f"r{request}", b"%d" % (request % 2 + 2 * prompt), tokens(length), version=version)
        corpus.drop_stale(version)
    kept = [text for prompt in range(8) for text in corpus.of(b"%d" % prompt)]
    assert sum(4 * len(text) + RESPONSE_BYTES for text in kept) == corpus.num_bytes <= 5 * RESPONSE_BYTES
    assert len(kept) == len(corpus)


def test_an_engine_drops_responses_of_old_versions(tmp_path):
    folder = save_model(tmp_path)
    scheduler = Scheduler(
        ModelSpec.read(folder), num_slots=4, max_len=256, kv_capacity=4096, stream_interval=1, drafts=True
    )
    sizes = []
    for ticket, version in enumerate([0, 1, OLDEST, OLDEST + 1, OLDEST + 2]):
        scheduler.load_weights(folder, version)
        sizes.append(scheduler.status().corpus_bytes // RESPONSE_BYTES)
        if version < OLDEST:
            scheduler.add_request(ticket, make_request(f"r{ticket}", length=20))
            while scheduler.has_work:
                scheduler.step()
    assert sizes == [0, 1, 2, 1, 0]
