"""A server of a shared GPU gives the memory of its KV cache back, and goes on as if nothing had happened."""

import pytest
import torch

from laminar_py.config.cluster import Device
from laminar_py.engines.sglang.launch import sharing_flags
from laminar_py.records.engine import PauseMode
from tests.engines.engine_conformance import caught, collect, make_request
from tests.engines.sglang.rig import make_model, running_server
from tests.engines.sglang.test_engine import client

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sglang,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LAYERS, HEADS, HEAD = 8, 8, 32  # of keys and values, as `make_model` sizes them by its hidden size
TOKENS = 2**20
CACHE_BYTES = TOKENS * LAYERS * 2 * HEADS * HEAD * 2


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


async def test_a_released_cache_is_free_memory_until_the_engine_resumes(tmp_path):
    model = make_model(tmp_path / "model", seed=0, hidden=512, layers=LAYERS)
    settings = {
        "device": Device.CUDA,
        "dtype": "bfloat16",
        "kv_capacity": TOKENS,
        "flags": sharing_flags(releases=True),
        "shared_gpus": "0",
    }
    async with running_server(model, tmp_path / "logs", **settings) as server, client(server) as engine:
        await engine.load_weights(model, 1)
        whole = await collect(engine, make_request(length=1900))
        for _ in range(3):
            request = await caught(engine, make_request(length=1900))
            full = free_bytes()
            await engine.pause(PauseMode.RELEASE)
            assert free_bytes() - full > 0.95 * CACHE_BYTES
            await engine.resume()
            assert free_bytes() - full < 0.05 * CACHE_BYTES
            assert len((await request.response()).ids) == len(whole.ids)
