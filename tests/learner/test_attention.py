"""Which kernel attends, by what is installed."""

import sys
from pathlib import Path

import pytest
import torch

from laminar_py.learner.attention import PackedKernel, choose_kernel

FLASH2, FLASH4 = "flash_attn_interface.py", "cute/interface.py"


@pytest.mark.parametrize(
    ("files", "capability", "kernel"),
    [
        ((), (9, 0), PackedKernel.VARLEN),
        ((FLASH2,), (8, 0), PackedKernel.FLASH),
        ((FLASH2, FLASH4), (9, 0), PackedKernel.FLASH),
        ((FLASH4,), (9, 0), PackedKernel.FLASH4),
        ((FLASH4,), (10, 0), PackedKernel.FLASH4),
        ((FLASH4,), (8, 0), PackedKernel.VARLEN),
    ],
)
def test_the_kernel_is_the_best_that_is_installed(monkeypatch, tmp_path: Path, files, capability, kernel):
    for file in files:
        path = tmp_path / "flash_attn" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_kernel(torch.device("cuda")) is kernel
    assert choose_kernel(torch.device("cpu")) is PackedKernel.SDPA
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]
