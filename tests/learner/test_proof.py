"""The proof of a learner step: what a sound step proves, and which mistakes it shows."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from laminar_py.config.algorithm import AlgorithmConfig, Divergence, ReferencePass
from laminar_py.config.learner import LearnerConfig
from laminar_py.learner import step as step_module
from laminar_py.learner.losses import loss as loss_module
from laminar_py.learner.model import policy_logprobs
from laminar_py.learner.moves import STILL_UPDATES
from laminar_py.learner.proof import StepProver
from laminar_py.learner.step import Learner
from laminar_py.records.columns import REFERENCE_LOGPROBS, TEACHER_LOGPROBS
from laminar_py.records.proofs import POWERS, GradientSums, StepProof, id_sum
from laminar_py.records.trajectory import MicroBatch
from tests.learner.builders import (
    SETTINGS,
    make_learner,
    make_mixture_folder,
    make_model_folder,
    make_sequences,
    pack,
)


def batches(learner: Learner, *, names: str = "abcdef") -> list[MicroBatch]:
    """Two microbatches of six trajectories whose behaviour is the learner's own policy, but for rounding."""
    sequences = make_sequences()
    found = []
    for part, ids in ((sequences[:3], names[:3]), (sequences[3:], names[3:])):
        batch = msgspec.structs.replace(pack(part, num_total=6), id_sum=id_sum(ids))
        with torch.no_grad():
            own = policy_logprobs(learner.model, batch)[0].numpy() * np.float32(1 + 1e-6)
        found.append(msgspec.structs.replace(batch, behaviour_logprobs=own))
    return found


def prove(learner: Learner, **options: str) -> StepProof:
    proof = learner.step(batches(learner, **options)).proof
    assert proof is not None
    return proof


def gap(sums: GradientSums) -> float:
    return abs(sums.found - sums.expected) / sums.spread


def tenfold_rate(adamw: torch.optim.AdamW) -> None:
    for group in adamw.param_groups:
        group["lr"] *= 10


def decay(adamw: torch.optim.AdamW) -> None:
    for group in adamw.param_groups:
        group["weight_decay"] = 1.0


def forget(adamw: torch.optim.AdamW) -> None:
    adamw.state.clear()


def double(adamw: torch.optim.AdamW) -> None:
    torch.optim.AdamW.step(adamw)


@pytest.mark.parametrize("fault", [None, tenfold_rate, decay, forget, double])
def test_values_that_move_unlike_adamw_are_astray(
    tmp_path: Path, fault: Callable[[torch.optim.AdamW], None] | None
) -> None:
    settings = SETTINGS.model_copy(update={"grad_clip": 0.01, "warmup_steps": 4})
    learner = make_learner(make_model_folder(tmp_path / "model"), settings=settings)
    adamw = learner._optimizer.adamw
    assert all(not prove(learner).astray for _ in range(3))
    if fault is not None:
        step = adamw.step
        adamw.step = lambda: (fault(adamw), step())
    proof = prove(learner)
    assert (len(proof.astray) > 4) is (fault is not None)


def test_a_tensor_that_is_frozen_or_has_no_gradient_is_astray(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    learner = make_learner(folder)
    learner.model.model.embed_tokens.register_forward_hook(lambda _, __, out: out.detach())
    assert prove(learner).astray == ("model.embed_tokens.weight",)
    frozen = make_learner(folder).model.requires_grad_(False)
    ranks, settings = learner.ranks, LearnerConfig()
    assert "model.norm.weight" in StepProver(frozen, ranks, None, settings, AlgorithmConfig()).finish().astray


@pytest.mark.parametrize("kind", ["dense", "tied", "mixture"])
@pytest.mark.parametrize("updates", [1, 2])
def test_a_sound_step_proves_its_counts_and_its_gradient(tmp_path: Path, kind: str, updates: int) -> None:
    make = make_mixture_folder if kind == "mixture" else make_model_folder
    folder = make(tmp_path / "model", **({"tied": True} if kind == "tied" else {}))
    learner = make_learner(folder, algorithm=AlgorithmConfig(updates_per_step=updates), temperature=0.7)
    packed = batches(learner)
    proof = prove(learner)
    trained = sum(np.count_nonzero(batch.loss_weights) for batch in packed)
    assert (proof.tokens, proof.ids, proof.not_finite) == (trained, id_sum("abcdef"), 0)
    assert proof.weight == pytest.approx(1.0)
    assert proof.signal == pytest.approx(sum(float(batch.loss_weights @ batch.advantages) for batch in packed))
    assert proof.copied < proof.unsure == trained
    assert not proof.astray
    assert proof.fresh == trained
    assert len(proof.gradients) == updates
    assert all(gap(sums) < 1e-4 for sums in proof.gradients)
    assert proof.gradients[0].scale == pytest.approx(1.0, abs=1e-3)
    assert all(sums.exact.apart <= 1e-4 * sums.exact.advantages for sums in proof.gradients)
    assert proof.moved == updates * len(list(learner.model.parameters()))
    assert proof.uphill <= (updates - 1) * proof.moved / 10  # of a second update some follow momentum
    assert proof.still == ()


def test_lost_gradients_and_factors_of_the_loss_show(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, backward = step_module.policy_loss, Learner._backward
    monkeypatch.setattr(step_module, "policy_loss", lambda inputs, settings: loss(inputs, settings) / 2)
    (halved,) = prove(make_learner(model_folder)).gradients
    assert gap(halved) < 1e-4
    assert halved.scale == pytest.approx(0.5, abs=1e-3)
    monkeypatch.undo()

    def forgetful(self, update, *rest, **options):
        first, second = (dataclasses.replace(update, batches=[batch]) for batch in update.batches)
        found = backward(self, first, *rest, **options)
        self._optimizer.adamw.zero_grad()
        return found + backward(self, second, *rest, **options)

    monkeypatch.setattr(Learner, "_backward", forgetful)
    (lost,) = prove(make_learner(model_folder)).gradients
    assert gap(lost) > 0.1


@pytest.mark.parametrize("estimator", Divergence)
def test_the_gradient_of_a_penalty_is_told_from_its_definition(
    tmp_path: Path, estimator: Divergence, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_model_folder(tmp_path / "other", seed=1)
    algorithm = AlgorithmConfig(
        kl_coef=0.3, kl_estimator=estimator, reference=other, reference_pass=ReferencePass.LEARNER
    )
    learner = make_learner(make_model_folder(tmp_path / "model"), algorithm=algorithm)
    (sound,) = prove(learner).gradients
    assert sound.exact.penalties > 0.1 * sound.exact.advantages > 0
    assert sound.exact.apart < 1e-4 * sound.exact.advantages
    monkeypatch.setattr(loss_module, "penalised_advantages", lambda advantages, *_, **__: advantages)
    for kind, estimate in loss_module.ESTIMATORS.items():
        wrong = lambda now, reference, estimate=estimate: -estimate(now, reference)  # noqa: E731
        monkeypatch.setitem(loss_module.ESTIMATORS, kind, wrong)
    (ascending,) = prove(learner).gradients
    assert ascending.exact.apart > 0.5 * ascending.exact.penalties


@pytest.mark.parametrize("estimator", Divergence)
def test_a_penalty_beyond_the_cut_of_the_loss_is_no_fault(tmp_path: Path, estimator: Divergence) -> None:
    algorithm = AlgorithmConfig(
        kl_coef=0.1, kl_estimator=estimator, reference_pass=ReferencePass.STAGE, teacher_coef=0.1
    )
    learner = make_learner(make_model_folder(tmp_path / "model"), algorithm=algorithm)
    packed = batches(learner)
    packed = [
        msgspec.structs.replace(
            batch,
            columns={
                TEACHER_LOGPROBS: np.where(
                    np.arange(batch.num_tokens) % 2, batch.behaviour_logprobs, -50.0
                ).astype(np.float32),
                REFERENCE_LOGPROBS: np.where(np.arange(batch.num_tokens) % 3, -60.0, -3.0).astype(np.float32),
            },
        )
        for batch in packed
    ]
    proof = learner.step(packed).proof
    assert proof is not None
    (sums,) = proof.gradients
    assert sums.exact.penalties > 0.1 * sums.exact.advantages > 0
    assert sums.exact.apart < 1e-4 * sums.exact.penalties


def test_the_gain_is_of_advantages_and_rewards(model_folder: Path) -> None:
    learner = make_learner(model_folder)
    packed = batches(learner)
    by_token = sum(
        weight * advantage * batch.rewards[batch.responses[segment]]
        for batch in packed
        for segment, (begin, end) in enumerate(itertools.pairwise(batch.cu_seqlens))
        for weight, advantage in zip(batch.loss_weights[begin:end], batch.advantages[begin:end], strict=True)
    )
    assert prove(learner).gain == pytest.approx(float(by_token), rel=1e-5)


def test_other_trajectories_cut_responses_and_masked_numbers_show(model_folder: Path) -> None:
    learner = make_learner(model_folder)
    sound = prove(learner)
    assert prove(learner, names="abcdex").ids != sound.ids
    packed = batches(learner)
    cut = msgspec.structs.replace(
        packed[1], loss_weights=np.where(np.arange(len(packed[1].labels)) < 30, packed[1].loss_weights, 0)
    )
    proof = learner.step([packed[0], cut]).proof
    assert proof.tokens < sound.tokens
    assert proof.weight < sound.weight


def test_hidden_numbers_show_and_a_skipped_update_leaves_nothing(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(model_folder)
    first, second = batches(learner)
    behaviour = second.behaviour_logprobs.copy()
    behaviour[np.flatnonzero(second.loss_weights)[:2]] = np.nan
    faulty = [first, msgspec.structs.replace(second, behaviour_logprobs=behaviour)]
    skipped = learner.step(faulty)
    assert (skipped.skipped, skipped.proof.not_finite, skipped.proof.gradients) == (1, 0, ())
    make = step_module.make_loss_inputs

    def hidden(*arguments, **options):
        inputs = make(*arguments, **options)
        fresh = {"behaviour": inputs.logprobs.detach(), "proximal": inputs.logprobs.detach()}
        return dataclasses.replace(inputs, **fresh)

    monkeypatch.setattr(step_module, "make_loss_inputs", hidden)
    assert learner.step(faulty).proof.not_finite == 2


def test_copied_log_probabilities_show(model_folder: Path) -> None:
    learner = make_learner(model_folder)
    copied = []
    for batch in batches(learner):
        rows = torch.from_numpy(np.flatnonzero(batch.loss_weights))
        own = batch.behaviour_logprobs.copy()
        own[rows.numpy()] = policy_logprobs(learner.model, batch, rows)[0].detach().numpy()
        copied.append(msgspec.structs.replace(batch, behaviour_logprobs=own))
    proof = learner.step(copied).proof
    assert proof.copied == proof.unsure > 0


def test_a_tensor_that_the_optimizer_lacks_is_named_after_three_updates(model_folder: Path) -> None:
    learner = make_learner(model_folder)
    (name, forgotten), *_ = learner.model.named_parameters()
    (group,) = learner._optimizer.adamw.param_groups
    group["params"] = [parameter for parameter in group["params"] if parameter is not forgotten]
    proofs = [prove(learner) for _ in range(STILL_UPDATES)]
    assert [proof.still for proof in proofs] == [()] * (STILL_UPDATES - 1) + [(name,)]


def test_updates_that_climb_show(model_folder: Path) -> None:
    learner = make_learner(model_folder)
    learner._optimizer.adamw.param_groups[0]["maximize"] = True
    proof = prove(learner)
    assert proof.uphill == proof.moved > 0


def test_a_reference_that_changes_shows(model_folder: Path) -> None:
    learner = make_learner(model_folder, algorithm=AlgorithmConfig(kl_coef=0.1))
    first, second = prove(learner).reference, prove(learner).reference
    assert first == second != ""
    with torch.no_grad():
        next(iter(learner._reference.model.parameters())).add_(1e-3)
    assert prove(learner).reference != first


@pytest.mark.parametrize("lr", [1e-3, 1e-30])
def test_updates_that_are_lost_show_unless_fp32_cannot_hold_them(model_folder: Path, lr: float) -> None:
    learner = make_learner(model_folder, settings=LearnerConfig(lr=lr, weight_decay=0.0))
    kept = [parameter.detach().clone() for parameter in learner.model.parameters()]

    def restore(*_: object) -> None:
        with torch.no_grad():
            for parameter, value in zip(learner.model.parameters(), kept, strict=True):
                parameter.copy_(value)

    learner._optimizer.adamw.register_step_post_hook(restore)
    proofs = [prove(learner) for _ in range(STILL_UPDATES)]
    assert proofs[-1].moved == 0
    assert len(proofs[-1].still) == (len(kept) if lr == 1e-3 else 0)


def test_probes_have_the_distribution_of_a_plain_forward(model_folder: Path) -> None:
    learner = make_learner(model_folder, temperature=0.7)
    prompts = [np.array(ids, np.int32) for ids in ([3, 5, 7], [11], [2, 4, 6, 8])]
    plain_model = Qwen3ForCausalLM.from_pretrained(model_folder).eval()
    for prompt, found in zip(prompts, learner.probe(prompts), strict=True):
        with torch.no_grad():
            logits = plain_model(torch.from_numpy(prompt)[None].long()).logits[0, -1] / 0.7
        plain = logits.log_softmax(-1)
        assert found.logprobs == pytest.approx(plain[found.ids.tolist()].numpy(), abs=1e-5)
        assert found.normalizers[0] == pytest.approx((plain * POWERS[0]).logsumexp(0).item(), abs=1e-4)
