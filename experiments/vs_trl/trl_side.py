"""TRL's half of the comparison: runs inside `.venv-trl`, started by `run.py`, and imports nothing of laminar_py.

Trains a warm-started model with `GRPOTrainer` and writes its measurements to one JSON file:
`{"steps": [[response tokens, seconds], ...], "accuracy": [[step, seconds of RL so far, held-out accuracy], ...]}`.
The clock stands still while held-out accuracy is measured.
"""

import argparse
import json
import os
import re
import time
from pathlib import Path

# Read by OpenMP when torch is loaded: threads that sleep at a barrier leave the core to the one with work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer

PROMPTS_PER_STEP = 32
GROUP_SIZE = 8
MAX_NEW_TOKENS = 344
LEARNING_RATE = 1e-3
EVAL_EVERY = 5
MIN_STEPS = 20  # throughput is read over steps 3 to 20
ANSWER = re.compile(r"#(\d)$")


class Meter(TrainerCallback):
    """Times every step, evaluates every fifth, and stops the training at the target."""

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: PreTrainedTokenizerFast,
        *,
        heldout: list[dict[str, str]],
        target: float,
    ) -> None:
        self.steps: list[tuple[int, float]] = []  # response tokens, seconds
        self.accuracy: list[tuple[int, float, float]] = []  # step, seconds of RL so far, accuracy
        self._model, self._tokenizer = model, tokenizer
        self._heldout, self._target = heldout, target
        self._tokens = 0
        self._mark = 0.0

    def reward(
        self, completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: object
    ) -> list[float]:
        """1 for the right answer with end of sequence; called once a step, so it counts the tokens too."""
        self._tokens += sum(len(ids) for ids in completion_ids)
        end = self._tokenizer.eos_token_id
        return [
            float(ids[-1] == end and is_right(text, wanted))
            for text, ids, wanted in zip(completions, completion_ids, answer, strict=True)
        ]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Start the clock."""
        self._mark = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Close the step, look at the held-out prompts, and start the clock of the next step."""
        self.steps.append((self._tokens, time.perf_counter() - self._mark))
        self._tokens = 0
        tokens, seconds = self.steps[-1]
        print(f"step {state.global_step}: {tokens} response tokens in {seconds:.2f} s", flush=True)
        if state.global_step % EVAL_EVERY == 0:
            rl_s = sum(seconds for _, seconds in self.steps)
            self.accuracy.append((state.global_step, rl_s, self._evaluate()))
            print(f"step {state.global_step}: held-out accuracy {self.accuracy[-1][2]:.3f}", flush=True)
        reached = any(accuracy >= self._target for _, _, accuracy in self.accuracy)
        if reached and state.global_step >= MIN_STEPS:
            control.should_training_stop = True
        self._mark = time.perf_counter()

    @torch.no_grad()
    def _evaluate(self) -> float:
        """Greedy accuracy on all held-out prompts."""
        self._model.eval()
        inputs = self._tokenizer(
            [row["prompt"] for row in self._heldout], return_tensors="pt", padding=True, padding_side="left"
        )
        ids = self._model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        responses = ids[:, inputs["input_ids"].shape[1] :]
        self._model.train()
        ended = (responses == self._tokenizer.eos_token_id).any(dim=1).tolist()
        texts = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
        right = [
            end and is_right(text, row["answer"])
            for text, row, end in zip(texts, self._heldout, ended, strict=True)
        ]
        return sum(right) / len(right)


def is_right(response: str, answer: str) -> bool:
    """The digit behind the last `#`, at the end of the response, is the answer."""
    found = ANSWER.search(response)
    return found is not None and found.group(1) == answer


def read_rows(path: Path) -> list[dict[str, str]]:
    """One dictionary per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def settings(out: Path, *, seed: int, steps: int, microbatch: int) -> GRPOConfig:
    """The recipe of configs/quickstart.yaml in TRL's settings, with the fastest ones for two cores."""
    batch = PROMPTS_PER_STEP * GROUP_SIZE
    return GRPOConfig(
        output_dir=str(out),
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=batch // microbatch,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_NEW_TOKENS,
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,  # no KL term, so no reference model runs
        epsilon=0.2,
        epsilon_high=0.28,
        num_iterations=1,
        loss_type="grpo",  # mean over the tokens of each response, then over responses
        scale_rewards="group",
        mask_truncated_completions=False,
        use_cpu=True,
        bf16=False,  # TRL's defaults, both slower here
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="GRPO with TRL on a warm-started model")
    parser.add_argument("model", type=Path, help="Hugging Face folder with safetensors and tokenizer.json")
    parser.add_argument("train", type=Path, help="JSONL with prompt and answer")
    parser.add_argument("heldout", type=Path, help="JSONL of the same form")
    parser.add_argument("out", type=Path, help="JSON file of the measurements")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120, help="end here if the target is not reached before")
    parser.add_argument("--target", type=float, default=0.9, help="held-out accuracy that ends the training")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--microbatch", type=int, default=32, help="responses in one backward pass")
    return parser.parse_args()


def main() -> None:
    """Train and write the measurements."""
    args = parse()
    torch.set_num_threads(args.threads)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(args.model / "tokenizer.json"), eos_token="<eos>", pad_token="<pad>"
    )
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    meter = Meter(model, tokenizer, heldout=read_rows(args.heldout), target=args.target)
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=meter.reward,
        args=settings(args.out.parent / "trl", seed=args.seed, steps=args.steps, microbatch=args.microbatch),
        train_dataset=Dataset.from_list(read_rows(args.train)),
        callbacks=[meter],
    )
    trainer.train()
    args.out.write_text(json.dumps({"steps": meter.steps, "accuracy": meter.accuracy}))


if __name__ == "__main__":
    main()
