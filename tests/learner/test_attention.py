"""Which kernel attends: by what is asked for, what is installed, and what computes right."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from laminar_py.config.learner import Attention, LearnerConfig
from laminar_py.config.section import ConfigError
from laminar_py.learner import kernel_check
from laminar_py.learner.attention import KERNELS, Segments, missing_module, sdpa_per_sequence
from laminar_py.learner.kernel_check import MOST_ERROR, RESULTS, check_kernel, choose_kernel, plain_attention
from tests.learner.builders import make_learner, make_model_folder

CPU = torch.device("cpu")
SHAPES = ((4, 2, 16), (7, 1, 64), (28, 4, 128))  # heads, heads of keys and values, values of a head
FLASH2, FLASH3, FLASH4 = (
    "flash_attn/flash_attn_interface.py",
    "flash_attn_interface.py",
    "flash_attn/cute/interface.py",
)


def check(kernel, dtype=torch.bfloat16, shape=SHAPES[0]):
    heads, kv_heads, head_dim = shape
    return check_kernel(kernel, device=CPU, dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


def choose(wanted=Attention.AUTO, device=CPU):
    return choose_kernel(wanted, device=device, heads=4, kv_heads=2, head_dim=16)


# ---- kernels that are wrong


class LateGradient(torch.autograd.Function):
    """The right values, and a gradient for all but the last row, as a kernel that skips its last tile."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[-1] = 0
        return gradient


class LargeHead(torch.autograd.Function):
    """Values of one head that are 10 % too large, and the right gradient."""

    @staticmethod
    def forward(ctx, values):
        values = values.clone()
        values[:, -1] *= 1.1
        return values

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def wrong_output(*arguments):
    return LargeHead.apply(sdpa_per_sequence(*arguments))


def wrong_gradient(place):
    def kernel(*arguments):
        *tensors, segments, scale = arguments
        tensors[place] = LateGradient.apply(tensors[place])
        return sdpa_per_sequence(*tensors, segments, scale)

    return kernel


def leaks(q, k, v, segments, scale):
    """The sequence of one token sees its neighbour."""
    cuts = (cut[[0, 2, 3, 4, 5]] for cut in segments[:2])
    return sdpa_per_sequence(q, k, v, Segments(*cuts, *segments[2:]), scale)


def parted(q, k, v, segments, scale, mask):
    lengths = [segments.cu_queries.diff().tolist(), *[segments.cu_keys.diff().tolist()] * 2]
    parts = zip(*(x.split(cut) for x, cut in zip((q, k, v), lengths, strict=True)), strict=True)
    return torch.cat(
        [
            nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in part),
                attn_mask=mask(*map(len, part[:2])),
                scale=scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
            for part in parts
        ]
    )


def sees_the_future(*arguments):
    return parted(*arguments, lambda queries, keys: None)


def sees_the_stem_alone(*arguments):
    """Aligned at the first key, where queries are fewer than keys."""
    return parted(*arguments, lambda queries, keys: torch.ones(queries, keys, dtype=torch.bool).tril())


def takes_heads_in_turn(q, k, v, *others):
    """Query head h reads heads h % 2 of keys and values, instead of h // 2."""
    order = torch.tensor([0, 2, 1, 3])
    return sdpa_per_sequence(q[:, order], k, v, *others)[:, order.argsort()]


def not_finite(q, *others):
    return (
        sdpa_per_sequence(q, *others) + torch.where(torch.arange(q.shape[0]) == 7, torch.nan, 0.0)[:, None, None]
    )


def raises(*_):
    raise RuntimeError("no kernel image\nis available")


WRONG = {
    wrong_output: {RESULTS[0]},
    wrong_gradient(0): {RESULTS[1]},
    wrong_gradient(1): {RESULTS[2]},
    wrong_gradient(2): {RESULTS[3]},
    leaks: {RESULTS[0], RESULTS[3]},
    sees_the_future: set(RESULTS),
    sees_the_stem_alone: set(RESULTS),
    takes_heads_in_turn: set(RESULTS),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sdpa_passes_with_room(dtype, shape):
    found = check(Attention.SDPA, dtype, shape)
    assert found.fault == ""
    assert found.errors.keys() == set(RESULTS)
    assert max(found.errors.values()) < MOST_ERROR[dtype] * 0.8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kernel", "results"), WRONG.items())
def test_a_wrong_kernel_is_refused_by_the_results_that_are_wrong(monkeypatch, kernel, results, dtype):
    monkeypatch.setitem(KERNELS, Attention.VARLEN, kernel)
    found = check(Attention.VARLEN, dtype)
    assert {name for name, error in found.errors.items() if error > MOST_ERROR[dtype]} >= results
    assert len(results) > 1 or results == {name for name in RESULTS if f"{name} by" in found.fault}


def test_a_kernel_that_raises_or_is_not_finite_is_refused(monkeypatch):
    monkeypatch.setitem(KERNELS, Attention.VARLEN, raises)
    assert check(Attention.VARLEN).fault == "it raised RuntimeError: no kernel image is available"
    monkeypatch.setitem(KERNELS, Attention.VARLEN, not_finite)
    assert "the output by inf times" in check(Attention.VARLEN, torch.float32).fault


def test_plain_attention_is_attention():
    q, k, v = (torch.randn(9, heads, 8, dtype=torch.float64) for heads in (6, 3, 3))
    arguments = (q, k, v, Segments.of([4, 1, 4], device=torch.device("cpu")), 0.3)
    torch.testing.assert_close(plain_attention(*arguments), sdpa_per_sequence(*arguments))


# ---- the choice


def install(monkeypatch, folder: Path, files, capability=(9, 0)):
    """Put modules into a folder of the path, and pretend a GPU; kernels compute on the CPU."""
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.partition(".")[0].startswith("flash_attn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.fixture(autouse=True)
def forget_modules():
    yield
    for name in [name for name in sys.modules if name.partition(".")[0].startswith("flash_attn")]:
        del sys.modules[name]


@pytest.fixture
def sound(monkeypatch):
    """All kernels pass; returns the names that were checked."""
    checked = []

    def passes(kernel, **_):
        checked.append(kernel)
        return kernel_check.KernelCheck(kernel=kernel, dtype=torch.bfloat16)

    monkeypatch.setattr(kernel_check, "check_kernel", passes)
    return checked


@pytest.mark.parametrize(
    ("files", "capability", "kernel"),
    [
        ((), (9, 0), Attention.VARLEN),
        ((FLASH2,), (8, 0), Attention.FLASH2),
        ((FLASH2, FLASH3, FLASH4), (9, 0), Attention.FLASH3),
        ((FLASH2, FLASH3), (8, 0), Attention.FLASH2),
        ((FLASH2, FLASH3), (10, 0), Attention.FLASH2),
        ((FLASH4,), (9, 0), Attention.VARLEN),
        ((FLASH4,), (10, 0), Attention.VARLEN),
    ],
)
def test_auto_takes_the_best_that_is_installed_and_no_beta(
    monkeypatch, tmp_path, sound, files, capability, kernel
):
    install(monkeypatch, tmp_path, files, capability)
    assert choose(device=torch.device("cuda")).kernel is kernel
    assert choose(device=CPU) == (Attention.SDPA, ())


def test_a_beta_is_taken_when_it_is_named(monkeypatch, tmp_path, sound):
    install(monkeypatch, tmp_path, [FLASH2, FLASH4])
    assert choose(Attention.FLASH4, torch.device("cuda")).kernel is Attention.FLASH4
    assert sound == [Attention.FLASH4]


@pytest.mark.parametrize("kernel", [Attention.FLASH2, Attention.FLASH3, Attention.FLASH4])
def test_a_named_kernel_that_is_not_installed_stops_the_run(kernel):
    with pytest.raises(ConfigError, match=rf"learner.attention={kernel}: .*is not installed\); set it to auto"):
        choose(kernel)


def test_auto_goes_on_after_a_kernel_that_fails_and_says_which(monkeypatch, tmp_path, caplog):
    install(monkeypatch, tmp_path, [FLASH2, FLASH4])
    monkeypatch.setitem(KERNELS, Attention.FLASH2, raises)
    monkeypatch.setitem(KERNELS, Attention.VARLEN, wrong_gradient(1))
    monkeypatch.setitem(KERNELS, Attention.FLASH4, sdpa_per_sequence)
    monkeypatch.setattr(kernel_check, "activate", lambda kernel: None)  # there is no FlashAttention 4
    on_gpu = kernel_check._in_order(torch.device("cuda"))
    monkeypatch.setattr(kernel_check, "_in_order", lambda device: on_gpu)
    choice = choose()
    assert choice.kernel is Attention.FLASH4
    assert [line.partition(":")[0] for line in choice.refused] == ["flash2", "varlen"]
    lines = [record.getMessage() for record in caplog.records]
    words = "flash2: it raised RuntimeError: no kernel image is available (4/2 heads of 16)"
    assert lines[0] == f"attention kernel not used: {words}"
    assert lines[1].startswith(
        "attention kernel not used: varlen: it errs more than plain float32 attention: the gradient of k by "
    )


def test_a_named_kernel_that_fails_stops_the_run(monkeypatch):
    monkeypatch.setitem(KERNELS, Attention.VARLEN, leaks)
    words = r"learner.attention=varlen: no kernel can be used \(varlen: it errs more .*\); set it to auto, or"
    with pytest.raises(ConfigError, match=words):
        choose(Attention.VARLEN)


def test_torch_has_the_names_of_its_flash_attentions():
    """A torch that renames one would leave it unused, in silence."""
    assert missing_module(Attention.FLASH3) == "the module flash_attn_interface is not installed"
    assert missing_module(Attention.FLASH4) == "the module flash_attn.cute.interface is not installed"


def test_a_learner_uses_the_kernel_that_it_is_told(tmp_path):
    settings = LearnerConfig(attention=Attention.SDPA)
    model = make_learner(make_model_folder(tmp_path), settings=settings).model
    assert model.attention_choice.kernel is Attention.SDPA
    assert model.config._attn_implementation == "packed_sdpa"
    with pytest.raises(ConfigError, match=r"learner.attention=flash2: .*not installed"):
        make_learner(tmp_path, settings=LearnerConfig(attention=Attention.FLASH2))
