"""The benchmark of the embedded engine in its smallest form: both sides run, nothing is compared."""

import torch
from transformers import Qwen3Config

from laminar_py.bench.engine_local import Lengths, Load, rows

torch.set_num_threads(1)

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


def test_each_load_gives_its_ratio_and_both_rates():
    heard = []
    found = rows(
        repeats=2,
        tell=heard.append,
        model=TINY,
        loads=(Load(1, 2), Load(4, 6)),
        lengths=Lengths(median=4, p95=10, cap=12),
    )
    names = ("local_over_hf", "local_useful_tokens", "hf_useful_tokens")
    assert [row.name for row in found] == [f"{name}_c{load}" for load in (1, 4) for name in names]
    assert all(row.value > 0 for row in found)
    assert len(heard) == 4
