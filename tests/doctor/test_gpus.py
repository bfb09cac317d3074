"""The catalog of GPUs."""

import pytest

from laminar_lab.gpus import GPUS, gpu_named
from laminar_py.config.section import ConfigError


def test_every_gpu_is_found_by_its_name_in_any_case():
    assert [gpu_named(gpu.name.lower()) for gpu in GPUS] == list(GPUS)


def test_an_unknown_gpu_is_told_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"^gpu=V100: unknown; choose A100, H100, H800, H200, B200, RTX4090$"):
        gpu_named("V100")


def test_figures_are_in_bytes_and_flops_a_second():
    """Decode is bound by bandwidth below a few hundred sequences on every GPU, so the ratio tells a wrong unit."""
    assert all(100 < gpu.bf16_flops / gpu.hbm_bytes_per_s < 400 for gpu in GPUS)
    assert all(gpu.link_bytes_per_s < gpu.hbm_bytes_per_s < gpu.bf16_flops for gpu in GPUS)
    assert all(gpu.source for gpu in GPUS)
