"""The supervised phase before RL. One process calls it, before the learner starts.

`cache` names the folder of the result, which appears by rename when it is complete. So a folder that exists may be
used (`tests/supervised/test_warm_start.py`).
"""

import os
import random
import shutil
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from laminar_contrib.supervised.settings import SupervisedConfig
from laminar_py.config import ConfigError
from laminar_py.config.data import ModelConfig
from laminar_py.config.warm_start import OnStep
from laminar_py.data import Demonstration
from laminar_py.learner import export_hf, load_policy, policy_logprobs
from laminar_py.records.trajectory import MicroBatch

BETAS = (0.9, 0.95)  # AdamW's decay rates
WEIGHT_DECAY = 0.01
GRAD_CLIP = 1.0
WARMUP_STEPS = 20
DECAY_SHARE = 0.4  # last share of the steps, in which the learning rate decays
POOL = 1024  # examples that are sorted by length together


def warm_start(
    model: ModelConfig,
    settings: SupervisedConfig,
    examples: Sequence[Demonstration],
    *,
    folder: Path,
    seed: int,
    on_step: OnStep = lambda step, steps, loss: None,
) -> None:
    """Train a model on `examples` and write it to `folder` in Hugging Face's form.

    `examples` come from `settings.data`, and `folder` from `cache.cached_folder`. Calls `on_step` after each step.
    Raises `ConfigError` if the model's folder holds no usable model, there are no examples, or an example does not
    fit into a step.
    """
    if not examples:
        raise ConfigError("warm_start.data: the files have no examples; add lines with prompt and response")
    if (longest := max(example.num_tokens for example in examples)) > (most := settings.tokens_per_step):
        raise ConfigError(f"warm_start.tokens_per_step={most}: the longest example has {longest} tokens; raise it")
    policy = load_policy(model, seed=seed, temperature=1.0, device=torch.device("cpu"))
    lr = settings.peak_lr(model)
    train_supervised(policy, examples, settings=settings, lr=lr, seed=seed, on_step=on_step)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(partial, ignore_errors=True)  # left by a crashed process that had our id
    export_hf(policy, partial, source=model.path, dtype=torch.float32)
    if folder.is_dir():  # another process was faster; its result is the same
        shutil.rmtree(partial)
    else:
        partial.rename(folder)


def train_supervised(
    policy: PreTrainedModel,
    examples: Sequence[Demonstration],
    *,
    settings: SupervisedConfig,
    lr: float,
    seed: int,
    on_step: OnStep = lambda step, steps, loss: None,
) -> None:
    """Train `policy` in place for `settings.steps` AdamW steps on packed batches of `examples`; `lr` is the peak.

    The order of the examples is drawn from `seed`, again for each epoch. Calls `on_step` after each step.
    """
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    batches = epochs(examples, tokens_per_step=settings.tokens_per_step, generator=random.Random(seed))
    for step, batch in enumerate(islice(batches, settings.steps)):
        optimizer.param_groups[0]["lr"] = lr * warm_start_lr_factor(step, settings.steps)
        row = pack_examples(batch)
        logprobs, _ = policy_logprobs(policy, row)
        loss = -(torch.tensor(row.loss_weights) * logprobs).sum()  # mean cross-entropy of the responses
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad()
        on_step(step + 1, settings.steps, loss.item())


def warm_start_lr_factor(step: int, num_steps: int) -> float:
    """Learning-rate factor at a step (from 0): linear warm-up in 20 steps, linear decay in the last 40 %."""
    return min(1.0, (step + 1) / WARMUP_STEPS, (num_steps - step) / (DECAY_SHARE * num_steps))


def epochs(
    examples: Sequence[Demonstration], *, tokens_per_step: int, generator: random.Random
) -> Iterator[list[Demonstration]]:
    """Yield batches of at most `tokens_per_step` tokens without end, shuffled again for each epoch.

    Examples of similar length share a batch, since they are sorted in pools of 1,024. Batches come in random
    order. Short examples therefore share a step with other short ones, and a step has many of them.
    """
    order = list(examples)
    while True:
        generator.shuffle(order)
        batches: list[list[Demonstration]] = []
        for start in range(0, len(order), POOL):
            room = 0  # tokens that still fit into the last batch; a pool starts a new batch
            for example in sorted(order[start : start + POOL], key=lambda example: example.num_tokens):
                if example.num_tokens > room:
                    batches.append([])
                    room = tokens_per_step
                batches[-1].append(example)
                room -= example.num_tokens
        generator.shuffle(batches)
        yield from batches


def pack_examples(examples: Sequence[Demonstration]) -> MicroBatch:
    """Pack examples into one row whose loss is the mean over all response tokens."""
    lengths = [example.num_tokens for example in examples]
    tokens = [np.concatenate((example.prompt_ids, example.response_ids)) for example in examples]
    mask = np.array([0, 1, 0], np.float32)
    rows = [(len(example.prompt_ids) - 1, len(example.response_ids), 1) for example in examples]
    trained = np.concatenate([np.repeat(mask, counts) for counts in rows])  # predict a response
    unused = np.zeros(sum(lengths), dtype=np.float32)
    return MicroBatch(
        input_ids=np.concatenate(tokens).astype(np.int32),
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32),
        position_ids=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        labels=np.concatenate([np.append(row[1:], 0) for row in tokens]).astype(np.int32),
        loss_weights=trained / trained.sum(),
        behaviour_logprobs=unused,
        advantages=unused,
        staleness=np.zeros(sum(lengths), dtype=np.int32),
        responses=np.arange(len(lengths), dtype=np.int32),
        rewards=np.zeros(len(lengths), dtype=np.float32),
        groups=np.zeros(len(lengths), dtype=np.int32),
    )
