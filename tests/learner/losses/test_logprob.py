"""Chunked log-probabilities and entropy are those of a plain log_softmax, gradients included."""

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils.flop_counter import FlopCounterMode

from laminar_py.learner.losses import logprob
from laminar_py.learner.losses.logprob import Support, token_logprobs

T, H, V = 23, 8, 17


def naive(hidden, weight, labels, temperature):
    logp = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=generator, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(V, H, generator=generator, requires_grad=True)
    return hidden, weight, torch.randint(0, V, (T,), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 7, 23, 512])
def test_values_and_gradients_equal_log_softmax(temperature: float, chunk: int):
    hidden, weight, labels = inputs()
    upstream = torch.linspace(-1.0, 1.0, T)
    results = []
    for function in (naive, lambda *args: token_logprobs(*args[:3], temperature=args[3], chunk=chunk)):
        logprobs, entropy = function(hidden, weight, labels, temperature)
        loss = (upstream * logprobs).sum() + (upstream.flip(0) * entropy).sum()
        results.append((logprobs, entropy, *torch.autograd.grad(loss, (hidden, weight))))
    for mine, reference in zip(*reversed(results), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("upstream", ["log-probabilities", "entropy", "both"])
@pytest.mark.parametrize("cut", [False, True])
def test_what_a_gpu_compiles_gives_the_same(monkeypatch: pytest.MonkeyPatch, upstream: str, cut: bool):
    hidden, weight, labels = inputs()
    ids = np.sort(np.stack([labels.numpy(), (labels.numpy() + 3) % V], 1), 1)
    support = Support.build(np.full(T, 2, np.int32), ids.astype(np.int32).ravel(), device=hidden.device)
    results = []
    for kernel in (lambda function, _: function, lambda function, _: torch.compile(function, fullgraph=True)):
        monkeypatch.setattr(logprob, "_compiled_if_possible", kernel)
        logprobs, entropy = token_logprobs(
            hidden.bfloat16(),
            weight.bfloat16(),
            labels,
            temperature=0.7,
            support=support if cut else None,
            chunk=9,
        )
        loss = {"log-probabilities": logprobs, "entropy": entropy, "both": logprobs + entropy}[upstream].sum()
        results.append((logprobs, entropy, *torch.autograd.grad(loss, (hidden, weight))))
    for compiled, plain in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-2, atol=1e-3)


def test_lengths_that_change_compile_nothing_anew(monkeypatch: pytest.MonkeyPatch):
    counter = CompileCounter()
    made = {
        name: torch.compile(getattr(logprob, name), backend=counter)
        for name in ("_logprobs_of_labels", "_gradient_of_logits")
    }
    monkeypatch.setattr(logprob, "_compiled_if_possible", lambda function, _: made[function.__name__])
    seen = []
    for length in (23, 22, 17, 11, 9, 23, 8, 2, 19):
        hidden, weight, labels = inputs()
        token_logprobs(hidden[:length], weight, labels[:length], chunk=8)[0].sum().backward()
        seen.append(counter.frame_count)
    assert seen[-1] == seen[1] <= 4  # each for one size, then for any


def test_a_gpu_without_a_compiler_has_no_kernels_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert not logprob._can_compile.__wrapped__(torch.device("cpu"))
    assert not caplog.records
    assert not logprob._can_compile.__wrapped__(torch.device("cuda"))
    assert "Triton needs gcc or clang" in caplog.text


@pytest.mark.parametrize("chunk", [1, 4, 8, 30])
def test_chunks_cover_all_tokens_and_are_alike(chunk: int):
    for length in range(1, 40):
        chunks = logprob._chunks(length, chunk)
        sizes = [part.stop - part.start for part in chunks]
        assert [place for part in chunks for place in range(part.start, part.stop)] == list(range(length))
        assert max(sizes) <= chunk
        assert len(sizes) == -(-length // chunk)
    assert logprob._chunks(0, chunk) == []


def test_unused_entropy_leaves_the_gradient_of_the_logprobs():
    hidden, weight, labels = inputs()
    expected = torch.autograd.grad(naive(hidden, weight, labels, 1.0)[0].sum(), (hidden, weight))
    mine = torch.autograd.grad(token_logprobs(hidden, weight, labels)[0].sum(), (hidden, weight))
    for grad, reference in zip(mine, expected, strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-5, atol=1e-6)


def test_over_a_part_of_the_vocabulary_values_and_gradients_are_those_of_masked_logits():
    """Rows with some ids, with one alone, and with none, which is the whole vocabulary."""
    hidden, weight, labels = inputs()
    generator = np.random.default_rng(0)
    rows = [
        [] if t % 5 == 0 else sorted({int(labels[t]), *generator.choice(V, t % 7, replace=False).tolist()})
        for t in range(T)
    ]
    outside = torch.tensor([[bool(row) and token not in row for token in range(V)] for row in rows])
    logp = torch.log_softmax((hidden @ weight.t() / 0.7).masked_fill(outside, -torch.inf), -1)
    entropy = -torch.where(outside, 0.0, logp.exp() * logp.masked_fill(outside, 0.0)).sum(-1)
    plain = (logp.gather(1, labels[:, None])[:, 0], entropy)
    counts, ids = [len(row) for row in rows], [token for row in rows for token in row]
    support = Support.build(np.array(counts, np.int32), np.array(ids, np.int32), device=torch.device("cpu"))
    mine = token_logprobs(hidden, weight, labels, temperature=0.7, support=support, chunk=4)
    upstream = torch.linspace(-1.0, 1.0, T)
    for found, expected in zip(mine, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    gradients = [
        torch.autograd.grad((upstream * one).sum() + (upstream.flip(0) * two).sum(), (hidden, weight))
        for one, two in (mine, plain)
    ]
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_frozen_head_saves_its_product_and_leaves_the_gradient_of_the_hidden_states():
    hidden, weight, labels = inputs()
    gradients, flops = [], []
    for head in (weight, weight.detach()):
        logprobs, _ = token_logprobs(hidden, head, labels, chunk=7)
        with FlopCounterMode(display=False) as counter:
            gradients.append(
                torch.autograd.grad(logprobs.sum(), (hidden, head) if head.requires_grad else (hidden,))[0]
            )
            flops.append(counter.get_total_flops())
    assert torch.equal(*gradients)
    assert flops == [3 * 2 * T * H * V, 2 * 2 * T * H * V]
