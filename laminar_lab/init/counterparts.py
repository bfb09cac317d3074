"""Our settings beside the settings of TRL and verl: what each means, how theirs differs, and its conversion.

`laminar init` translates files by this table and takes its comments from it; docs/config.md and
docs/from_trl_verl.md are generated from it. The names are in `laminar_py.config.their_names`.
"""

from dataclasses import dataclass

from laminar_lab.init import conversions as c
from laminar_lab.init.conversions import Convert
from laminar_py.config.their_names import ACTOR, MODEL, OPTIM, OtherTrainer


@dataclass(frozen=True, slots=True)
class Counterpart:
    """One of our settings and its conversions from other trainers, by default the value of their first name."""

    meaning: str  # a few words: the comment in a written config
    trl: Convert = c.first
    verl: Convert = c.first
    differs: str = ""  # from theirs

    def convert(self, trainer: OtherTrainer) -> Convert:
        """Return the function from a trainer's settings to our value."""
        return self.trl if trainer is OtherTrainer.TRL else self.verl


EPOCHS = {OtherTrainer.TRL: "num_train_epochs", OtherTrainer.VERL: "trainer.total_epochs"}
PLACED = "laminar init places all parts"
MOST_CHANGED = 25  # the first rows, with which docs/config.md begins
COUNTERPARTS = {
    "model.path": Counterpart(
        "Hugging Face folder: config.json, tokenizer.json, safetensors", differs="a folder, no name on the hub"
    ),
    "data.train": Counterpart(
        "rows with a prompt (or messages) and an answer",
        trl=c.trl_data,
        verl=c.verl_data,
        differs="`columns` names their columns: `{answer: solution}`, `{answer: reward_model.ground_truth}`",
    ),
    "eval.sets": Counterpart(
        "held-out rows", trl=c.trl_sets, verl=c.verl_sets, differs="any number of sets, each with its own sampling"
    ),
    "reward.use": Counterpart(
        "terms of the reward: math, code, exact, or file.py:function",
        trl=c.trl_reward,
        verl=c.verl_reward,
        differs="`def score(request) -> float` scores one response; a term has a `weight`",
    ),
    "steps": Counterpart("learner steps", trl=c.positive, verl=c.positive, differs="steps, no epochs"),
    "rollout.prompts_per_step": Counterpart(
        "groups of a learner step",
        trl=c.trl_prompts,
        verl=c.positive,
        differs="TRL counts completions of a process, here prompts of all processes",
    ),
    "rollout.group_size": Counterpart("samples of one prompt", trl=c.group, verl=c.group),
    "rollout.sampling.max_new_tokens": Counterpart(
        "cap on the tokens of a response", trl=c.positive, verl=c.positive
    ),
    "rollout.max_len": Counterpart(
        "most tokens of prompt and response together",
        trl=c.trl_max_len,
        verl=c.total,
        differs="a longer prompt is refused, not cut",
    ),
    "rollout.sampling.temperature": Counterpart("temperature of training samples"),
    "learner.lr": Counterpart("learning rate of AdamW"),
    "learner.lora.rank": Counterpart(
        "rank of the adapters; without `lora` all weights are trained", trl=c.trl_lora, verl=c.verl_lora
    ),
    "algorithm.name": Counterpart(
        "grpo, dapo, dr_grpo, rloo, gspo, cispo, ...",
        trl=c.trl_name,
        differs="a name fills in the settings of `algorithm` that the file leaves out",
    ),
    "algorithm.kl_coef": Counterpart(
        "weight of the divergence from the reference model",
        trl=c.coefficient,
        verl=c.verl_kl,
        differs="`algorithm.beta` here is another setting",
    ),
    "algorithm.updates_per_step": Counterpart(
        "optimizer steps in a learner step",
        trl=c.trl_updates,
        verl=c.verl_updates,
        differs="each on its own part of the batch",
    ),
    "rollout.engine.kind": Counterpart(
        "local (embedded, on CPUs) or sglang",
        trl=c.elsewhere("SGLang or the embedded engine takes its place"),
        verl=c.elsewhere("SGLang or the embedded engine takes its place"),
        differs="engines have GPUs of their own, beside the learner's",
    ),
    "rollout.replicas": Counterpart(
        "inference engines",
        verl=c.elsewhere(PLACED),
        differs="`laminar plan` divides GPUs between engines and learner",
    ),
    "rollout.max_batch": Counterpart("most responses that one engine decodes at a time", verl=c.positive),
    "staleness.max_staleness": Counterpart(
        "age in learner steps above which a response counts less",
        differs="generation runs ahead of the learner",
    ),
    "learner.world_size": Counterpart(
        "ranks of the learner (FSDP2)", differs="verl's engines and learner share `trainer.n_gpus_per_node`"
    ),
    "learner.recompute": Counterpart(
        "none, selective, all or all_offloaded: compute activations again, to save memory",
        trl=c.when("all"),
        verl=c.when("all"),
    ),
    "packer.max_tokens": Counterpart(
        "most tokens of a microbatch, which has no padding",
        verl=c.positive,
        differs="in place of TRL's `per_device_train_batch_size` for memory",
    ),
    "eval.every_steps": Counterpart(
        "learner steps between two evaluations", trl=c.trl_eval_steps, verl=c.positive
    ),
    "learner.checkpoint_every": Counterpart(
        "learner steps between two checkpoints", trl=c.positive, verl=c.positive
    ),
    "tracking.kinds": Counterpart("tensorboard, wandb, mlflow", trl=c.trackers, verl=c.trackers),
    "name": Counterpart("name of the run; its files are in runs/<name>-<n>"),
    "seed": Counterpart("seed of prompt order, sampling and initialisation"),
    "rollout.sampling.top_p": Counterpart(
        "smallest set of tokens with this probability",
        differs="a cut vocabulary needs `sampling_mask` in `rollout.record`",
    ),
    "rollout.sampling.top_k": Counterpart(
        "most probable tokens that are kept; 0: all",
        trl=c.positive,
        verl=c.positive,
        differs="0 keeps all, as verl's -1",
    ),
    "rollout.sampling.min_p": Counterpart("tokens with this share of the highest probability are kept"),
    "learner.lora.alpha": Counterpart("scale of the adapters, times the rank", trl=c.trl_lora, verl=c.verl_lora),
    "learner.lora.targets": Counterpart(
        "projections with adapters",
        trl=c.trl_targets,
        verl=c.verl_targets,
        differs="all seven projections of a layer by default",
    ),
    "learner.warmup_steps": Counterpart("steps of the linear warm-up", trl=c.trl_warmup, verl=c.positive),
    "learner.decay": Counterpart(
        "none, linear or cosine",
        trl=c.choice(
            {"linear": "linear", "cosine": "cosine", "constant": None, "constant_with_warmup": None},
            "choose none, linear or cosine",
        ),
        verl=c.choice({"constant": None, "cosine": "cosine"}, "choose none, linear or cosine"),
        differs="none by default; TRL: linear",
    ),
    "learner.weight_decay": Counterpart("AdamW's weight decay"),
    "learner.betas": Counterpart("AdamW's decay rates", trl=c.numbers),
    "learner.grad_clip": Counterpart("largest gradient norm"),
    "learner.keep_checkpoints": Counterpart("newest checkpoints to keep", trl=c.positive, verl=c.positive),
    "learner.offload": Counterpart("optimizer and master weights in the host's memory", verl=c.when(True)),
    "algorithm.clip_low": Counterpart("ratios below 1 - clip_low are clipped", trl=c.trl_clip_low),
    "algorithm.clip_high": Counterpart("ratios above 1 + clip_high are clipped", trl=c.trl_clip_high),
    "algorithm.importance_cap": Counterpart(
        "cap on ratios of tokens with a negative advantage", differs="none by default; verl: 3"
    ),
    "algorithm.objective": Counterpart(
        "clip, sequence_clip, weighted or balance",
        trl=c.choice({"token": None, "sequence": "sequence_clip"}, "choose clip or sequence_clip"),
        verl=c.choice(
            {"vanilla": None, "gspo": "sequence_clip"}, "write an objective of your own, see docs/extending.md"
        ),
    ),
    "algorithm.aggregation": Counterpart(
        "token_mean, sequence_mean or constant",
        trl=c.choice(
            {
                "grpo": None,
                "dapo": "token_mean",
                "bnpo": "token_mean",
                "cispo": "token_mean",
                "dr_grpo": "constant",
            },
            "write a loss of your own, see docs/extending.md",
        ),
        verl=c.choice(
            {"token-mean": "token_mean", "seq-mean-token-mean": None, "seq-mean-token-sum-norm": "constant"},
            "choose token_mean, sequence_mean or constant",
        ),
        differs="`sequence_mean` by default; TRL and verl: token mean",
    ),
    "algorithm.advantage": Counterpart(
        "group_std, group_mean, leave_one_out, batch_std or gae", trl=c.trl_scale, verl=c.verl_advantage
    ),
    "algorithm.critic.lr": Counterpart("learning rate of the value model", verl=c.of_critic),
    "algorithm.critic.gamma": Counterpart("discount for each action", verl=c.of_critic),
    "algorithm.critic.policy_lambda": Counterpart("GAE's lambda for advantages", verl=c.of_critic),
    "algorithm.critic.value_lambda": Counterpart(
        "GAE's lambda for targets of the values", verl=c.of_critic, differs="verl has one lambda for both"
    ),
    "algorithm.critic.clip": Counterpart("largest move of a value in a step", verl=c.of_critic),
    "algorithm.kl_estimator": Counterpart("k1, k2 or k3", verl=c.verl_kl_kind, differs="TRL has k3"),
    "algorithm.truncated": Counterpart(
        "train on truncated responses, which a cap ended, or mask them", trl=c.when("mask")
    ),
    "rollout.without_signal": Counterpart(
        "groups whose rewards are all equal: skip, train or refill",
        verl=c.when("refill"),
        differs="`refill` is DAPO's dynamic sampling",
    ),
    "rollout.engine.tensor_parallel": Counterpart(
        "GPUs of one engine", trl=c.elsewhere(PLACED), verl=c.elsewhere(PLACED)
    ),
    "rollout.engine.flags": Counterpart(
        "flags of SGLang's server, e.g. mem-fraction-static", trl=c.elsewhere(PLACED), verl=c.elsewhere(PLACED)
    ),
    "tracking.project": Counterpart("project in wandb, experiment in MLflow"),
    "runs": Counterpart("folder of all runs"),
}

# their defaults that differ from ours
DEFAULTS: dict[OtherTrainer, dict[str, object]] = {
    OtherTrainer.TRL: {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_generations": 8,
        "num_train_epochs": 3,
        "max_completion_length": 512,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "linear",
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "gradient_checkpointing": True,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "lora_r": 16,
        "lora_alpha": 32,
    },
    OtherTrainer.VERL: {
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "trainer.total_epochs": 30,
        "algorithm.adv_estimator": "gae",
        "algorithm.gamma": 1.0,
        "algorithm.lam": 1.0,
        "critic.optim.lr": 1e-5,
        "critic.cliprange_value": 0.5,
        f"{MODEL}.enable_gradient_checkpointing": True,
        f"{ACTOR}.ppo_mini_batch_size": 256,
        f"{ACTOR}.loss_agg_mode": "token-mean",
        f"{ACTOR}.clip_ratio_c": 3.0,
        f"{ACTOR}.kl_loss_coef": 0.001,
        f"{ACTOR}.kl_loss_type": "low_var_kl",
        f"{OPTIM}.lr": 1e-6,
        f"{OPTIM}.weight_decay": 0.01,
        f"{OPTIM}.betas": [0.9, 0.999],
        f"{MODEL}.lora_alpha": 16,
    },
}
