"""Settings of TRL and verl beside ours: one table, for people who come from there.

`laminar init --from` translates files by it, a mistyped key gets its "did you mean" from it, and docs/config.md
and docs/from_trl_verl.md are generated from it. Names and defaults come from TRL 1.16 (`GRPOConfig`,
`ModelConfig`, the script of `trl grpo`) and from verl's `ppo_trainer.yaml`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from laminar_py.config.conversions import (
    ACTOR,
    MODEL,
    OPTIM,
    ROLLOUT,
    Theirs,
    Trainer,
    choice,
    elsewhere,
    group,
    number,
    positive,
    sums,
    targets,
    trackers,
    trl_clip_high,
    trl_data,
    trl_eval_steps,
    trl_lora,
    trl_prompts,
    trl_reward,
    trl_scale,
    trl_sets,
    trl_updates,
    trl_warmup,
    verl_advantage,
    verl_data,
    verl_kl,
    verl_kl_kind,
    verl_lora,
    verl_sets,
    verl_updates,
    when,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterpart:
    """One of our settings, e.g. `learner.lr`, and the same setting of other trainers."""

    key: str
    meaning: str  # a few words: the comment in a written config
    trl: Theirs | None = None
    verl: Theirs | None = None
    differs: str = ""  # from theirs

    def of(self, trainer: Trainer) -> Theirs | None:
        """Return the names in a trainer; None without a counterpart."""
        return self.trl if trainer is Trainer.TRL else self.verl


EPOCHS = {Trainer.TRL: "num_train_epochs", Trainer.VERL: "trainer.total_epochs"}
PLACED = "laminar init places all parts"
MOST_CHANGED = 25  # the first rows, with which docs/config.md begins
COUNTERPARTS = (
    Counterpart(
        key="model.path",
        meaning="Hugging Face folder: config.json, tokenizer.json, safetensors",
        trl=Theirs(("model_name_or_path",)),
        verl=Theirs((f"{MODEL}.path",)),
        differs="a folder, no name on the hub",
    ),
    Counterpart(
        key="data.train",
        meaning="rows with a prompt (or messages) and an answer",
        trl=Theirs(("dataset_name", "dataset_config", "dataset_train_split", "datasets"), trl_data),
        verl=Theirs(("data.train_files", "data.prompt_key"), verl_data),
        differs="`columns` names their columns: `{answer: solution}`, `{answer: reward_model.ground_truth}`",
    ),
    Counterpart(
        key="eval.sets",
        meaning="held-out rows",
        trl=Theirs(("eval_strategy", "dataset_test_split"), trl_sets),
        verl=Theirs(("data.val_files", f"{ROLLOUT}.val_kwargs.n", f"{ROLLOUT}.val_kwargs.temperature"), verl_sets),
        differs="any number of sets, each with its own sampling",
    ),
    Counterpart(
        key="reward.use",
        meaning="terms of the reward: math, code, exact, or file.py:function",
        trl=Theirs(("reward_funcs", "reward_model_name_or_path"), trl_reward),
        verl=elsewhere(
            "rewards have other arguments, see docs/rewards.md",
            "custom_reward_function.path",
            "custom_reward_function.name",
        ),
        differs="`def score(request) -> float` scores one response",
    ),
    Counterpart(
        key="steps",
        meaning="learner steps",
        trl=positive("max_steps"),
        verl=positive("trainer.total_training_steps"),
        differs="steps, no epochs",
    ),
    Counterpart(
        key="rollout.prompts_per_step",
        meaning="groups of a learner step",
        trl=Theirs(
            (
                "per_device_train_batch_size",
                "gradient_accumulation_steps",
                "steps_per_generation",
                "generation_batch_size",
                "num_processes",
            ),
            trl_prompts,
        ),
        verl=positive("data.train_batch_size"),
        differs="TRL counts completions of a process, here prompts of all processes",
    ),
    Counterpart(
        key="rollout.group_size",
        meaning="samples of one prompt",
        trl=group("num_generations"),
        verl=group(f"{ROLLOUT}.n"),
    ),
    Counterpart(
        key="rollout.sampling.max_new_tokens",
        meaning="cap on the tokens of a response",
        trl=positive("max_completion_length"),
        verl=positive("data.max_response_length"),
    ),
    Counterpart(
        key="rollout.max_len",
        meaning="most tokens of prompt and response together",
        trl=positive("vllm_max_model_length"),
        verl=Theirs(
            ("data.max_prompt_length", "data.max_response_length"),
            sums("data.max_prompt_length", "data.max_response_length"),
        ),
        differs="a longer prompt is refused, not cut",
    ),
    Counterpart(
        key="rollout.sampling.temperature",
        meaning="temperature of training samples",
        trl=Theirs(("temperature",)),
        verl=Theirs((f"{ROLLOUT}.temperature",)),
    ),
    Counterpart(
        key="learner.lr",
        meaning="learning rate of AdamW",
        trl=Theirs(("learning_rate",)),
        verl=Theirs((f"{OPTIM}.lr",)),
    ),
    Counterpart(
        key="learner.lora.rank",
        meaning="rank of the adapters; without `lora` all weights are trained",
        trl=Theirs(("use_peft", "lora_r"), trl_lora("lora_r")),
        verl=Theirs((f"{MODEL}.lora_rank",), verl_lora(f"{MODEL}.lora_rank")),
    ),
    Counterpart(
        key="algorithm.name",
        meaning="grpo, dapo, dr_grpo, rloo, gspo, cispo, ...",
        trl=Theirs(("loss_type",), lambda given: "cispo" if given.get("loss_type") == "cispo" else None),
        differs="a name fills in the settings of `algorithm` that the file leaves out",
    ),
    Counterpart(
        key="algorithm.kl_coef",
        meaning="weight of the divergence from the reference model",
        trl=Theirs(("beta",), lambda given: number(given, "beta") or None),
        verl=Theirs((f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef"), verl_kl),
        differs="`algorithm.beta` here is another setting",
    ),
    Counterpart(
        key="algorithm.updates_per_step",
        meaning="optimizer steps in a learner step",
        trl=Theirs(("num_iterations", "steps_per_generation", "generation_batch_size"), trl_updates),
        verl=Theirs((f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_epochs"), verl_updates),
        differs="each on its own part of the batch",
    ),
    Counterpart(
        key="rollout.engine.kind",
        meaning="local (embedded, on CPUs) or sglang",
        trl=elsewhere("SGLang or the embedded engine takes its place", "use_vllm", "vllm_mode"),
        verl=elsewhere("SGLang or the embedded engine takes its place", f"{ROLLOUT}.name"),
        differs="engines have GPUs of their own, beside the learner's",
    ),
    Counterpart(
        key="rollout.replicas",
        meaning="inference engines",
        trl=None,
        verl=elsewhere(PLACED, "trainer.n_gpus_per_node", "trainer.nnodes"),
        differs="`laminar plan` divides GPUs between engines and learner",
    ),
    Counterpart(
        key="rollout.max_batch",
        meaning="most responses that one engine decodes at a time",
        verl=positive(f"{ROLLOUT}.max_num_seqs"),
    ),
    Counterpart(
        key="staleness.max_staleness",
        meaning="most learner steps between a response's weights and its training",
        differs="generation runs ahead of the learner",
    ),
    Counterpart(
        key="learner.world_size",
        meaning="ranks of the learner (FSDP2)",
        differs="verl's engines and learner share `trainer.n_gpus_per_node`",
    ),
    Counterpart(
        key="learner.recompute",
        meaning="none, selective or all: compute activations again, to save memory",
        trl=when("gradient_checkpointing", "all"),
        verl=when(f"{MODEL}.enable_gradient_checkpointing", "all"),
    ),
    Counterpart(
        key="packer.max_tokens",
        meaning="most tokens of a microbatch, which has no padding",
        verl=positive(f"{ACTOR}.ppo_max_token_len_per_gpu"),
        differs="in place of TRL's `per_device_train_batch_size` for memory",
    ),
    Counterpart(
        key="eval.every_steps",
        meaning="learner steps between two evaluations",
        trl=Theirs(("eval_steps",), trl_eval_steps),
        verl=positive("trainer.test_freq"),
    ),
    Counterpart(
        key="learner.checkpoint_every",
        meaning="learner steps between two checkpoints",
        trl=positive("save_steps"),
        verl=positive("trainer.save_freq"),
    ),
    Counterpart(
        key="tracking.kinds",
        meaning="tensorboard, wandb, mlflow",
        trl=trackers("report_to"),
        verl=trackers("trainer.logger"),
    ),
    Counterpart(
        key="name",
        meaning="name of the run; its files are in runs/<name>-<n>",
        trl=Theirs(("run_name",)),
        verl=Theirs(("trainer.experiment_name",)),
    ),
    Counterpart(
        key="seed",
        meaning="seed of prompt order, sampling and initialisation",
        trl=Theirs(("seed",)),
        verl=Theirs(("data.seed",)),
    ),
    Counterpart(
        key="rollout.sampling.top_p",
        meaning="smallest set of tokens with this probability",
        trl=Theirs(("top_p",)),
        verl=Theirs((f"{ROLLOUT}.top_p",)),
        differs="a cut vocabulary needs `sampling_mask` in `rollout.record`",
    ),
    Counterpart(
        key="rollout.sampling.top_k",
        meaning="most probable tokens that are kept; 0: all",
        trl=positive("top_k"),
        verl=positive(f"{ROLLOUT}.top_k"),
        differs="0 keeps all, as verl's -1",
    ),
    Counterpart(
        key="rollout.sampling.min_p",
        meaning="tokens with this share of the highest probability are kept",
        trl=Theirs(("min_p",)),
    ),
    Counterpart(
        key="learner.lora.alpha",
        meaning="scale of the adapters, times the rank",
        trl=Theirs(("lora_alpha",), trl_lora("lora_alpha")),
        verl=Theirs((f"{MODEL}.lora_alpha",), verl_lora(f"{MODEL}.lora_alpha")),
    ),
    Counterpart(
        key="learner.lora.targets",
        meaning="projections with adapters",
        trl=targets("lora_target_modules", trl_lora("lora_r")),
        verl=targets(f"{MODEL}.target_modules", verl_lora(f"{MODEL}.lora_rank")),
        differs="all seven projections of a layer by default",
    ),
    Counterpart(
        key="learner.warmup_steps",
        meaning="steps of the linear warm-up",
        trl=Theirs(("warmup_steps",), trl_warmup),
        verl=positive(f"{OPTIM}.lr_warmup_steps"),
    ),
    Counterpart(
        key="learner.decay",
        meaning="none, linear or cosine",
        trl=choice(
            "lr_scheduler_type",
            {"linear": "linear", "cosine": "cosine", "constant": None, "constant_with_warmup": None},
            "choose none, linear or cosine",
        ),
        verl=choice(
            f"{OPTIM}.lr_scheduler_type", {"constant": None, "cosine": "cosine"}, "choose none, linear or cosine"
        ),
        differs="none by default; TRL: linear",
    ),
    Counterpart(
        key="learner.weight_decay",
        meaning="AdamW's weight decay",
        trl=Theirs(("weight_decay",)),
        verl=Theirs((f"{OPTIM}.weight_decay",)),
    ),
    Counterpart(
        key="learner.betas",
        meaning="AdamW's decay rates",
        trl=Theirs(
            ("adam_beta1", "adam_beta2"), lambda given: [number(given, "adam_beta1"), number(given, "adam_beta2")]
        ),
        verl=Theirs((f"{OPTIM}.betas",)),
    ),
    Counterpart(
        key="learner.grad_clip",
        meaning="largest gradient norm",
        trl=Theirs(("max_grad_norm",)),
        verl=Theirs((f"{ACTOR}.grad_clip", f"{OPTIM}.clip_grad")),
    ),
    Counterpart(
        key="learner.keep_checkpoints",
        meaning="newest checkpoints to keep",
        trl=positive("save_total_limit"),
        verl=positive("trainer.max_actor_ckpt_to_keep"),
    ),
    Counterpart(
        key="learner.offload",
        meaning="optimizer and master weights in the host's memory",
        verl=when(f"{ACTOR}.fsdp_config.optimizer_offload", True),
    ),
    Counterpart(
        key="algorithm.clip_low",
        meaning="ratios below 1 - clip_low are clipped",
        trl=Theirs(
            ("epsilon",), lambda given: None if given.get("loss_type") == "cispo" else given.get("epsilon")
        ),
        verl=Theirs((f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio")),
    ),
    Counterpart(
        key="algorithm.clip_high",
        meaning="ratios above 1 + clip_high are clipped",
        trl=Theirs(("epsilon_high",), trl_clip_high),
        verl=Theirs((f"{ACTOR}.clip_ratio_high", f"{ACTOR}.clip_ratio")),
    ),
    Counterpart(
        key="algorithm.importance_cap",
        meaning="cap on ratios of tokens with a negative advantage",
        trl=Theirs(("delta",)),
        verl=Theirs((f"{ACTOR}.clip_ratio_c",)),
        differs="none by default; verl: 3",
    ),
    Counterpart(
        key="algorithm.objective",
        meaning="clip, sequence_clip, weighted or balance",
        trl=choice(
            "importance_sampling_level",
            {"token": None, "sequence": "sequence_clip"},
            "choose clip or sequence_clip",
        ),
        verl=choice(
            f"{ACTOR}.policy_loss.loss_mode",
            {"vanilla": None, "gspo": "sequence_clip"},
            "write an objective of your own, see docs/extending.md",
        ),
    ),
    Counterpart(
        key="algorithm.aggregation",
        meaning="token_mean, sequence_mean or constant",
        trl=choice(
            "loss_type",
            {
                "grpo": None,
                "dapo": "token_mean",
                "bnpo": "token_mean",
                "cispo": "token_mean",
                "dr_grpo": "constant",
            },
            "write a loss of your own, see docs/extending.md",
        ),
        verl=choice(
            f"{ACTOR}.loss_agg_mode",
            {"token-mean": "token_mean", "seq-mean-token-mean": None, "seq-mean-token-sum-norm": "constant"},
            "choose token_mean, sequence_mean or constant",
        ),
        differs="`sequence_mean` by default; TRL and verl: token mean",
    ),
    Counterpart(
        key="algorithm.advantage",
        meaning="group_std, group_mean, leave_one_out or batch_std",
        trl=Theirs(("scale_rewards",), trl_scale),
        verl=Theirs(("algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"), verl_advantage),
    ),
    Counterpart(
        key="algorithm.kl_estimator",
        meaning="k1, k2 or k3",
        verl=Theirs((f"{ACTOR}.kl_loss_type",), verl_kl_kind),
        differs="TRL has k3",
    ),
    Counterpart(
        key="algorithm.truncated",
        meaning="train on truncated responses, which a cap ended, or mask them",
        trl=when("mask_truncated_completions", "mask"),
    ),
    Counterpart(
        key="rollout.without_signal",
        meaning="groups whose rewards are all equal: skip, train or refill",
        verl=when("algorithm.filter_groups.enable", "refill"),
        differs="`refill` is DAPO's dynamic sampling",
    ),
    Counterpart(
        key="rollout.engine.tensor_parallel",
        meaning="GPUs of one engine",
        trl=elsewhere(PLACED, "vllm_tensor_parallel_size"),
        verl=elsewhere(PLACED, f"{ROLLOUT}.tensor_model_parallel_size"),
    ),
    Counterpart(
        key="rollout.engine.flags",
        meaning="flags of SGLang's server, e.g. mem-fraction-static",
        trl=elsewhere(PLACED, "vllm_gpu_memory_utilization"),
        verl=elsewhere(PLACED, f"{ROLLOUT}.gpu_memory_utilization"),
    ),
    Counterpart(
        key="tracking.project",
        meaning="project in wandb, experiment in MLflow",
        trl=Theirs(("project",)),
        verl=Theirs(("trainer.project_name",)),
    ),
    Counterpart(
        key="runs",
        meaning="folder of all runs",
        trl=Theirs(("output_dir",)),
        verl=Theirs(("trainer.default_local_dir",)),
    ),
)

# their defaults that differ from ours
DEFAULTS: dict[Trainer, dict[str, object]] = {
    Trainer.TRL: {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_generations": 8,
        "num_train_epochs": 3,
        "max_completion_length": 512,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "linear",
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "lora_r": 16,
        "lora_alpha": 32,
    },
    Trainer.VERL: {
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "trainer.total_epochs": 30,
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

# their settings that have no counterpart, and why; a name that ends with a dot stands for all below it
WITHOUT: dict[Trainer, dict[str, str]] = {
    Trainer.TRL: {
        "bf16": "GPUs compute in bf16 with fp32 masters",
        "fp16": "GPUs compute in bf16 with fp32 masters",
        "dtype": "the model's own is served, masters are fp32",
        "attn_implementation": "the learner takes the best kernel that is installed",
        "logging_steps": "every step is logged",
        "log_completions": "laminar samples RUN",
        "reward_weights": "a term of reward.use has a `weight`",
        "lora_dropout": "adapters have no dropout",
        "push_to_hub": "laminar export, then upload the folder",
        "save_strategy": "learner.checkpoint_every",
        "vllm_importance_sampling_correction": "algorithm.proximal and algorithm.correction",
        "vllm_importance_sampling_mode": "algorithm.proximal and algorithm.correction",
    },
    Trainer.VERL: {
        "critic.": "there is no critic",
        "trainer.critic_warmup": "there is no critic",
        "trainer.val_before_train": "sets are evaluated before and after RL",
        "trainer.device": "laminar init places all parts",
        "data.truncation": "a long prompt is refused",
        "data.filter_overlong_prompts": "a long prompt is refused",
        "algorithm.use_kl_in_reward": "algorithm.kl_coef with kl_estimator: k1",
        "algorithm.kl_ctrl.": "algorithm.kl_coef",
        f"{MODEL}.use_remove_padding": "sequences are packed always",
        f"{ACTOR}.use_dynamic_bsz": "microbatches are packed always",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": "packer.max_tokens",
        f"{ACTOR}.entropy_coeff": "write a loss of your own, see docs/extending.md",
        f"{ACTOR}.fsdp_config.": "FSDP2 shards all of the learner",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": "packer.max_tokens",
        "actor_rollout_ref.ref.": "packer.max_tokens; the reference is sharded as the learner",
    },
}
_TITLES = {Trainer.TRL: "TRL", Trainer.VERL: "verl"}
VERL_SECTIONS = ("actor_rollout_ref", "critic", "custom_reward_function", "reward_model", "trainer")


def their_names_for(key: str) -> list[tuple[str, str]]:
    """Return our settings for a key of another trainer, each with whose name it is.

    `learning_rate` gives `("learner.lr", "TRL's learning_rate")`. Of a dotted name of verl the last part suffices.
    """
    return [
        (row.key, f"{_TITLES[trainer]}'s {key}")
        for row in COUNTERPARTS
        for trainer in Trainer
        if (theirs := row.of(trainer)) is not None and key in _last_parts(theirs.names)
    ]


def reason_without(key: str) -> str:
    """Return what to do about a key of another trainer that has no counterpart, e.g. `bf16`; "" if unknown."""
    found = (
        f"{_TITLES[trainer]}'s {key} has no counterpart: {why}; "
        for trainer in Trainer
        for name, why in WITHOUT[trainer].items()
        if name.rpartition(".")[2] == key
    )
    return next(found, "")


def _last_parts(names: Sequence[str]) -> list[str]:
    return [name.rpartition(".")[2] for name in names if "val_kwargs" not in name]
