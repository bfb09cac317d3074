"""Names of TRL and verl for our settings: one table, for people who come from there.

A mistyped key gets its "did you mean" from it. `laminar_lab.init.counterparts` adds meanings and conversions for
`laminar init --from`, and docs/config.md and docs/from_trl_verl.md are generated from both. The names are of TRL
1.16 (`GRPOConfig`, `ModelConfig`, the script of `trl grpo`), three of its earlier releases, and of verl's
`ppo_trainer.yaml`.
"""

from enum import StrEnum

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
OPTIM = f"{ACTOR}.optim"


class OtherTrainer(StrEnum):
    """Trainers whose names are known, and whose files `laminar init --from` reads."""

    TRL = "trl"
    VERL = "verl"


# ours -> names in TRL and in verl, separated by spaces
NAMES = {
    "model.path": ("model_name_or_path", f"{MODEL}.path"),
    "data.train": (
        "dataset_name dataset_config dataset_train_split data_files datasets",
        "data.train_files data.prompt_key",
    ),
    "eval.sets": (
        "eval_strategy dataset_test_split",
        f"data.val_files {ROLLOUT}.val_kwargs.n {ROLLOUT}.val_kwargs.temperature",
    ),
    "reward.use": (
        "reward_funcs reward_weights reward_model_name_or_path",
        "custom_reward_function.path custom_reward_function.name",
    ),
    "steps": ("max_steps", "trainer.total_training_steps"),
    "rollout.prompts_per_step": (
        "per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size"
        " num_processes",
        "data.train_batch_size",
    ),
    "rollout.group_size": ("num_generations", f"{ROLLOUT}.n"),
    "rollout.sampling.max_new_tokens": ("max_completion_length", "data.max_response_length"),
    "rollout.max_len": (
        "vllm_max_model_length max_prompt_length",
        "data.max_prompt_length data.max_response_length",
    ),
    "rollout.sampling.temperature": ("temperature", f"{ROLLOUT}.temperature"),
    "learner.lr": ("learning_rate", f"{OPTIM}.lr"),
    "learner.lora.rank": ("use_peft lora_r", f"{MODEL}.lora_rank"),
    "algorithm.name": ("loss_type", ""),
    "algorithm.kl_coef": ("beta", f"{ACTOR}.use_kl_loss {ACTOR}.kl_loss_coef"),
    "algorithm.updates_per_step": (
        "num_iterations steps_per_generation generation_batch_size",
        f"{ACTOR}.ppo_mini_batch_size {ACTOR}.ppo_epochs",
    ),
    "rollout.engine.kind": ("use_vllm vllm_mode", f"{ROLLOUT}.name"),
    "rollout.replicas": ("", "trainer.n_gpus_per_node trainer.nnodes"),
    "rollout.max_batch": ("", f"{ROLLOUT}.max_num_seqs"),
    "learner.recompute": ("gradient_checkpointing", f"{MODEL}.enable_gradient_checkpointing"),
    "packer.max_tokens": ("", f"{ACTOR}.ppo_max_token_len_per_gpu"),
    "eval.every_steps": ("eval_steps", "trainer.test_freq"),
    "learner.checkpoint_every": ("save_steps", "trainer.save_freq"),
    "tracking.kinds": ("report_to", "trainer.logger"),
    "name": ("run_name", "trainer.experiment_name"),
    "seed": ("seed", "data.seed"),
    "rollout.sampling.top_p": ("top_p", f"{ROLLOUT}.top_p"),
    "rollout.sampling.top_k": ("top_k", f"{ROLLOUT}.top_k"),
    "rollout.sampling.min_p": ("min_p", ""),
    "learner.lora.alpha": ("lora_alpha", f"{MODEL}.lora_alpha"),
    "learner.lora.targets": ("lora_target_modules", f"{MODEL}.target_modules"),
    "learner.warmup_steps": ("warmup_steps warmup_ratio", f"{OPTIM}.lr_warmup_steps"),
    "learner.decay": ("lr_scheduler_type", f"{OPTIM}.lr_scheduler_type"),
    "learner.weight_decay": ("weight_decay", f"{OPTIM}.weight_decay"),
    "learner.betas": ("adam_beta1 adam_beta2", f"{OPTIM}.betas"),
    "learner.grad_clip": ("max_grad_norm", f"{ACTOR}.grad_clip {OPTIM}.clip_grad"),
    "learner.keep_checkpoints": ("save_total_limit", "trainer.max_actor_ckpt_to_keep"),
    "learner.offload": ("", f"{ACTOR}.fsdp_config.optimizer_offload"),
    "algorithm.clip_low": ("epsilon", f"{ACTOR}.clip_ratio_low {ACTOR}.clip_ratio"),
    "algorithm.clip_high": ("epsilon_high", f"{ACTOR}.clip_ratio_high {ACTOR}.clip_ratio"),
    "algorithm.importance_cap": ("delta", f"{ACTOR}.clip_ratio_c"),
    "algorithm.objective": ("importance_sampling_level", f"{ACTOR}.policy_loss.loss_mode"),
    "algorithm.aggregation": ("loss_type", f"{ACTOR}.loss_agg_mode"),
    "algorithm.advantage": ("scale_rewards", "algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo"),
    "algorithm.critic.lr": ("", "critic.optim.lr"),
    "algorithm.critic.gamma": ("", "algorithm.gamma"),
    "algorithm.critic.policy_lambda": ("", "algorithm.lam"),
    "algorithm.critic.value_lambda": ("", "algorithm.lam"),
    "algorithm.critic.clip": ("", "critic.cliprange_value"),
    "algorithm.kl_estimator": ("", f"{ACTOR}.kl_loss_type"),
    "algorithm.truncated": ("mask_truncated_completions", ""),
    "rollout.without_signal": ("", "algorithm.filter_groups.enable"),
    "rollout.engine.tensor_parallel": ("vllm_tensor_parallel_size", f"{ROLLOUT}.tensor_model_parallel_size"),
    "rollout.engine.flags": ("vllm_gpu_memory_utilization", f"{ROLLOUT}.gpu_memory_utilization"),
    "tracking.project": ("project", "trainer.project_name"),
    "runs": ("output_dir", "trainer.default_local_dir"),
}

# their settings that have no counterpart, and why; a name that ends with a dot stands for all below it
WITHOUT: dict[OtherTrainer, dict[str, str]] = {
    OtherTrainer.TRL: {
        "bf16": "GPUs compute in bf16 with fp32 masters",
        "fp16": "GPUs compute in bf16 with fp32 masters",
        "dtype": "the model's own is served, masters are fp32",
        "torch_dtype": "the model's own is served, masters are fp32",
        "attn_implementation": "the learner takes the best kernel that is installed",
        "logging_steps": "every step is logged",
        "logging_strategy": "every step is logged",
        "logging_first_step": "every step is logged",
        "log_completions": "laminar samples RUN",
        "lora_dropout": "adapters have no dropout",
        "push_to_hub": "laminar export, then upload the folder",
        "hub_model_id": "laminar export, then upload the folder",
        "save_strategy": "learner.checkpoint_every",
        "per_device_eval_batch_size": "replicas batch evaluations as they batch training",
        "eval_on_start": "sets are evaluated before and after RL",
        "do_eval": "eval.sets",
        "shuffle_dataset": "data.order is shuffled unless set",
        "remove_unused_columns": "a reward gets all columns",
        "trust_remote_code": "code of a model's folder is never run",
        "repetition_penalty": "the learner needs the sampled distribution, without penalties",
        "vllm_importance_sampling_correction": "algorithm.proximal and algorithm.correction",
        "vllm_importance_sampling_mode": "algorithm.proximal and algorithm.correction",
    },
    OtherTrainer.VERL: {
        "critic.": "a critic has the policy's settings, but for algorithm.critic",
        "trainer.critic_warmup": "policy and critic learn from the first step on",
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
_TITLES = {OtherTrainer.TRL: "TRL", OtherTrainer.VERL: "verl"}
VERL_SECTIONS = ("actor_rollout_ref", "critic", "custom_reward_function", "reward_model", "trainer")


def their_names(key: str, trainer: OtherTrainer) -> tuple[str, ...]:
    """Return the names of our setting `key` in another trainer; none without a counterpart."""
    return tuple(NAMES.get(key, ("", ""))[trainer is OtherTrainer.VERL].split())


def our_keys(name: str) -> list[tuple[str, str]]:
    """Return our settings for a name of another trainer, each with whose name it is.

    `learning_rate` gives `("learner.lr", "TRL's learning_rate")`. Of a dotted name of verl the last part suffices.
    """
    return [
        (key, f"{_TITLES[trainer]}'s {name}")
        for key in NAMES
        for trainer in OtherTrainer
        if name in [full.rpartition(".")[2] for full in their_names(key, trainer) if "val_kwargs" not in full]
    ]


def reason_without(name: str) -> str:
    """Return what to do about a name of another trainer that has no counterpart, e.g. `bf16`; "" if unknown."""
    found = (
        f"{_TITLES[trainer]}'s {name} has no counterpart: {why}; "
        for trainer in OtherTrainer
        for full, why in WITHOUT[trainer].items()
        if full.rpartition(".")[2] == name
    )
    return next(found, "")
