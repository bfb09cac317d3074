"""The benchmark of the relay in its smallest form: all sides run, nothing is compared."""

import torch
from transformers import Qwen3Config

from laminar_py.bench.relay import Scale, rows

torch.set_num_threads(1)

TINY = Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=64,
    tie_word_embeddings=True,
)


def test_every_figure_of_one_host_comes_once_and_is_positive():
    found = rows(repeats=1, tell=lambda line: None, scale=Scale(2**20, 2, TINY))
    hops = [f"{kind}_{row}" for kind in ("hop", "hop_curve", "ipc_hop") for row in ("over_socket", "GBps")]
    others = [f"{name}_over_ours" for name in ("ray", "gloo", "http")]
    deltas = [f"delta_{what}" for what in ("bytes_1e6", "bytes_3e6", "encode_GBps", "apply_GBps")]
    names = [*hops, "socket_GBps", "unix_socket_GBps", *others, "stall_over_memcpy", *deltas]
    assert sorted(row.name for row in found) == sorted(names)
    assert all(row.value > 0 for row in found)
