"""The engines' benchmarks: the embedded engine in the smallest form, and the CPU time of a client."""

import time

from transformers import Qwen3Config

from laminar_lab.bench.engine.local import Traffic, rows
from laminar_lab.bench.engine.sglang import STREAMS, TOKENS, client_round

TINY = Qwen3Config(
    vocab_size=32,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=16,
    max_position_embeddings=128,
)
SMALL = {"median": 4, "p95": 10, "cap": 12}
TRAFFIC = (Traffic(concurrency=1, num_requests=2, **SMALL), Traffic(concurrency=4, num_requests=6, **SMALL))


def test_both_sides_have_a_rate_at_each_concurrency(capsys):
    found = rows(repeats=2, model=TINY, traffic=TRAFFIC)
    assert [row.name for row in found] == [f"local_over_hf_c{slots}" for slots in (1, 4)]
    assert all(row.value > 0 for row in found)
    assert capsys.readouterr().err.count("\nround ") == 4


async def test_the_cpu_of_a_client_is_what_its_process_takes_for_all_streams():
    before = time.process_time()

    async def stream(_: str) -> None:
        until = time.thread_time() + 0.001
        while time.thread_time() < until:
            pass

    tokens_per_s, cpu_us_per_token = await client_round(stream, "turn")
    spent_s = cpu_us_per_token * STREAMS * TOKENS / 1e6
    assert 0.001 * STREAMS <= spent_s <= time.process_time() - before
    assert tokens_per_s > 0
