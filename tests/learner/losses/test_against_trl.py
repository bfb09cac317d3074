"""The losses that TRL has too: the same value and gradients, its padded batch against our packed one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from laminar_py.config.algorithm import AlgorithmConfig, Correction
from laminar_py.learner.packing.balance import fit_bins
from laminar_py.learner.packing.packer import deal_to_ranks, step_weights
from tests.builders import make_trajectory
from tests.learner.builders import VOCAB, backward, make_learner, make_model_folder, referred

LONGEST = 24
CASES = {
    "grpo": ({"loss_type": "grpo"}, {}),
    "clip-higher": ({"loss_type": "grpo", "epsilon_high": 0.28}, {"clip_high": 0.28}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"name": "dr_grpo"}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"name": "dapo"}),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 5.0}, {"name": "cispo"}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"name": "gspo"},
    ),
    "kl": ({"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False}, {"kl_coef": 0.3}),
    "off-policy sequence mask": (
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
        {"correction": Correction.NEGATIVE_MASK, "correction_low": 0.0, "correction_high": float(np.exp(0.05))},
    ),
}


def samples():
    """Two groups of three, of very different lengths; behaviour not far from a random policy over `VOCAB`."""
    generator = np.random.default_rng(0)
    items = []
    for index, length in enumerate((5, 24, 9, 13, 2, 17)):
        item = make_trajectory(f"g{index // 3}.{index % 3}", prompt=4, response=length, seed=index)
        logprobs = generator.normal(-np.log(VOCAB), 0.4, length).astype(np.float32)
        items.append(replace(item, logprobs=logprobs, advantage=float(generator.normal())))
    return items


def logprobs_under(folder: Path, item):
    """[L] of the response, by plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(np.concatenate([item.prompt_ids, item.response_ids])).long()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids[None]).logits[0], -1)
    return logprobs[:-1].gather(1, ids[1:, None])[len(item.prompt_ids) - 1 :, 0].numpy()


def theirs(folder: Path, options, items, reference: Path):
    """TRL's loss and gradients [each parameter]. It is imported here, for what it brings takes a second."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    trl = pytest.importorskip("trl", reason="trl is not installed")
    words = {"[pad]": 0, "a": 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")), pad_token="[pad]", eos_token="[pad]"
    )
    settings = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        max_completion_length=LONGEST,
        per_device_train_batch_size=6,
        num_generations=3,
        temperature=1.0,
        **options,
    )
    trainer = trl.GRPOTrainer(
        model=str(folder),
        reward_funcs=lambda **_: [],
        args=settings,
        train_dataset=datasets.Dataset.from_list([{"prompt": "a"}]),
        processing_class=tokenizer,
    )
    ids, mask = (np.zeros((len(items), LONGEST), np.int64) for _ in range(2))
    old, referred = (np.zeros((len(items), LONGEST), np.float32) for _ in range(2))
    for row, item in enumerate(items):
        length = len(item.response_ids)
        ids[row, :length], mask[row, :length], old[row, :length] = item.response_ids, 1, item.logprobs
        referred[row, :length] = logprobs_under(reference, item)
    inputs = {
        "prompt_ids": torch.tensor(np.stack([item.prompt_ids for item in items])).long(),
        "prompt_mask": torch.ones(len(items), 4, dtype=torch.long),
        "completion_ids": torch.tensor(ids),
        "completion_mask": torch.tensor(mask),
        "advantages": torch.tensor([item.advantage for item in items]),
        "old_per_token_logps": torch.tensor(old),
        "num_items_in_batch": torch.tensor(mask.sum()),
        "ref_per_token_logps": torch.tensor(referred),
    }
    model = trainer.model.eval()
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_trl(model_folder: Path, tmp_path: Path, case: str):
    options, ours = CASES[case]
    items = samples()
    reference = make_model_folder(tmp_path / "reference", seed=1)
    expected, gradients = theirs(model_folder, options, items, reference)
    algorithm = AlgorithmConfig(reference=reference, **ours)
    learner = make_learner(model_folder, algorithm=algorithm)
    bins = fit_bins(items, max_tokens=48)
    terms = step_weights(bins, aggregation=algorithm.aggregation, constant=LONGEST)
    batches = deal_to_ranks(bins, terms, max_tokens=48, ranks=1, attention_share=0.0).microbatches(0)
    loss = backward(learner, referred(learner, batches))
    assert loss == pytest.approx(expected, rel=0.0, abs=1e-6)
    for name, parameter in learner.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0.0, atol=1e-6)
        assert (parameter.grad - gradients[name]).norm() <= 1e-5 * gradients[name].norm(), "of small ones too"
