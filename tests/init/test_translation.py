"""Files of TRL and verl, as their users have them, become settings of ours."""

import pytest

from laminar_lab.init.translation import translate
from laminar_py.config import ConfigError
from laminar_py.config.their_names import OtherTrainer

TRL = """\
model_name_or_path: Qwen/Qwen2.5-7B
dataset_name: open-r1/DAPO-Math-17k-Processed
dataset_config: en
reward_funcs: [accuracy_reward, think_format_reward]
learning_rate: 1e-5
lr_scheduler_type: cosine
warmup_steps: 10
num_train_epochs: 2
num_processes: 8
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
steps_per_generation: 8
num_generations: 16
max_completion_length: 2048
beta: 0.04
epsilon_high: 0.28
loss_type: dr_grpo
scale_rewards: none
top_p: 0.95
use_peft: true
lora_r: 32
lora_target_modules: [q_proj, v_proj]
use_vllm: true
eval_strategy: steps
eval_steps: 25
report_to: [wandb, none]
logging_steps: 1
top_entropy_quantile: 0.2
"""
VERL = """\
set -x
train_path=$HOME/gsm8k/train.parquet
train_files="['$train_path']"
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="$train_files" \\
    data.val_files=$HOME/gsm8k/test.parquet \\
    data.train_batch_size=512 data.max_prompt_length=512 data.max_response_length=1024 \\
    actor_rollout_ref.model.path=${MODEL_PATH:-Qwen/Qwen2.5-7B} \\
    actor_rollout_ref.actor.optim.lr=3e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_type=kl \\
    actor_rollout_ref.actor.entropy_coeff=0.01 \\
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.val_kwargs.n=4 actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \\
    +actor_rollout_ref.rollout.unheard_of=7 \\
    trainer.critic_warmup=0 \\
    trainer.logger='["console","wandb"]' \\
    trainer.total_epochs=15 $@
"""


def translated(tmp_path, trainer, text, name="given.yaml"):
    (tmp_path / name).write_text(text)
    return translate(trainer, tmp_path / name)


def test_a_file_of_trl_becomes_our_settings(tmp_path):
    """64 completions of 8 processes are a step, and two steps are generated at a time."""
    found = translated(tmp_path, OtherTrainer.TRL, TRL)
    wanted = {
        "model.path": "Qwen/Qwen2.5-7B",
        "data.train": {
            "path": "open-r1/DAPO-Math-17k-Processed",
            "subset": "en",
            "columns": {"answer": "solution"},
        },
        "learner.lr": 1e-5,
        "learner.decay": "cosine",
        "learner.warmup_steps": 10,
        "learner.betas": [0.9, 0.999],
        "learner.lora.rank": 32,
        "learner.lora.alpha": 32,
        "learner.lora.targets": ["q_proj", "v_proj"],
        "rollout.prompts_per_step": 16,
        "rollout.group_size": 16,
        "rollout.sampling.max_new_tokens": 2048,
        "rollout.sampling.top_p": 0.95,
        "rollout.record": ["sampling_mask"],
        "algorithm.updates_per_step": 4,
        "algorithm.kl_coef": 0.04,
        "algorithm.clip_low": 0.2,
        "algorithm.clip_high": 0.28,
        "algorithm.aggregation": "constant",
        "algorithm.advantage": "group_mean",
        "eval.every_steps": 25,
        "learner.recompute": "all",
        "tracking.kinds": ["wandb"],
    }
    assert {key: found.settings.get(key) for key in wanted} == wanted
    assert set(found.settings) - set(wanted) == {"eval.sets", "reward.use"}
    assert found.settings["eval.sets"]["heldout"]["split"] == "test"
    assert [term if isinstance(term, str) else term["kind"] for term in found.settings["reward.use"]] == [
        "math",
        "format",
    ]
    assert found.epochs == 2
    assert found.lost == {
        "use_vllm=True": "SGLang or the embedded engine takes its place",
        "logging_steps=1": "every step is logged",
        "top_entropy_quantile=0.2": "",
    }


def test_a_script_of_verl_becomes_our_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/data")
    found = translated(tmp_path, OtherTrainer.VERL, VERL, "run.sh")
    columns = {"answer": "reward_model.ground_truth", "task": "data_source"}
    wanted = {
        "model.path": "Qwen/Qwen2.5-7B",
        "data.train": {"path": "/data/gsm8k/train.parquet", "columns": columns},
        "eval.sets": {
            "heldout": {"path": "/data/gsm8k/test.parquet", "columns": columns, "samples": 4, "temperature": 0.6}
        },
        "rollout.prompts_per_step": 512,
        "rollout.group_size": 5,
        "rollout.sampling.max_new_tokens": 1024,
        "rollout.max_len": 1536,
        "learner.lr": 3e-6,
        "learner.betas": [0.9, 0.999],
        "learner.weight_decay": 0.01,
        "algorithm.updates_per_step": 4,
        "algorithm.kl_coef": 0.001,
        "algorithm.kl_estimator": "k1",
        "algorithm.importance_cap": 3.0,
        "learner.recompute": "all",
        "tracking.kinds": ["wandb"],
    }
    assert found.settings == wanted
    assert found.epochs == 15
    assert found.lost == {
        "actor_rollout_ref.actor.entropy_coeff=0.01": "write a loss of your own, see docs/extending.md",
        "actor_rollout_ref.rollout.name=vllm": "SGLang or the embedded engine takes its place",
        "actor_rollout_ref.rollout.unheard_of=7": "",
    }


def test_hydra_yaml_is_read_like_its_overrides(tmp_path):
    text = "data: {train_batch_size: 64, val_files: a.parquet}\nactor_rollout_ref: {rollout: {n: 1}}\n"
    found = translated(tmp_path, OtherTrainer.VERL, text)
    assert found.settings["rollout.prompts_per_step"] == 64
    assert set(found.settings["eval.sets"]["heldout"]) == {"path", "columns"}, "greedy, as verl has it"
    assert found.settings["rollout.group_size"] == 1, "a critic needs no group"
    assert {name: value for name, value in found.settings.items() if name.startswith("algorithm.")} == {
        "algorithm.advantage": "gae",
        "algorithm.aggregation": "token_mean",
        "algorithm.critic.clip": 0.5,
        "algorithm.critic.gamma": 1.0,
        "algorithm.critic.lr": 1e-5,
        "algorithm.critic.policy_lambda": 1.0,
        "algorithm.critic.value_lambda": 1.0,
        "algorithm.importance_cap": 3.0,
    }
    assert found.lost == {}


def test_a_group_of_one_without_a_critic_is_no_group(tmp_path):
    text = "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 1}}\n"
    found = translated(tmp_path, OtherTrainer.VERL, text)
    assert "rollout.group_size" not in found.settings, "a group of one has no advantages"
    assert found.lost == {"actor_rollout_ref.rollout.n=1": "a group has two samples at least; 8 are used"}


def test_gradient_checkpointing_that_is_off_stays_off(tmp_path):
    text = "actor_rollout_ref.model.enable_gradient_checkpointing=False algorithm.adv_estimator=rloo\n"
    found = translated(tmp_path, OtherTrainer.VERL, text, "run.sh")
    assert "learner.recompute" not in found.settings
    assert (found.settings["algorithm.advantage"], found.lost) == ("leave_one_out", {})


@pytest.mark.parametrize(
    ("setting", "key", "value", "why"),
    [
        ("loss_type: cispo\nepsilon_high: 5.0", "algorithm.clip_high", 4.0, None),
        ("loss_type: cispo", "algorithm.name", "cispo", None),
        (
            "loss_type: luspo",
            "algorithm.aggregation",
            None,
            "write a loss of your own, see docs/extending.md",
        ),
        ("num_iterations: 2", "algorithm.updates_per_step", 1, "a trajectory is trained once"),
        (
            "scale_rewards: batch",
            "algorithm.advantage",
            None,
            "batch_std here also subtracts the mean of the step",
        ),
        ("save_steps: 0.1", "learner.checkpoint_every", None, "save_steps is a share; give a number of steps"),
        ("lora_r: 8", "learner.lora.rank", None, None),
        ("importance_sampling_level: sequence", "algorithm.objective", "sequence_clip", None),
        ("max_prompt_length: 256\nmax_completion_length: 128", "rollout.max_len", 384, None),
        ("warmup_ratio: 0.05\nmax_steps: 50", "learner.warmup_steps", 3, None),
        ("warmup_steps: 0.1\nmax_steps: 50", "learner.warmup_steps", 5, None),
        ("warmup_ratio: 0.1\nwarmup_steps: 7", "learner.warmup_steps", 7, None),
        ("warmup_ratio: 0.1", "learner.warmup_steps", None, "a share of steps, and the file counts epochs"),
        ("dataset_name: json", "data.train", None, "names a format, not a file"),
        ("dataset_name: csv\ndata_files: a.csv", "data.train", None, "a.csv: only paths of JSONL"),
        ("dataset_name: json\ndata_files: a.jsonl", "data.train", {"path": "a.jsonl"}, None),
        (
            "datasets: [{path: json, data_files: [a.jsonl, b.jsonl]}, {path: c/d}]",
            "data.train",
            [{"path": "a.jsonl"}, {"path": "b.jsonl"}, {"path": "c/d"}],
            None,
        ),
    ],
)
def test_a_value_without_a_counterpart_is_said_and_why(setting, key, value, why, tmp_path):
    found = translated(tmp_path, OtherTrainer.TRL, f"{setting}\n")
    assert found.settings.get(key) == value
    assert bool(found.lost) == (why is not None)
    assert why is None or any(reason.startswith(why) for reason in found.lost.values())


def test_weights_of_rewards_and_files_by_split_are_kept(tmp_path):
    text = "reward_funcs: [accuracy_reward, mine.bonus, think_format_reward]\nreward_weights: [1.0, 0.5, 0.2]\n"
    text += "dataset_name: json\ndata_files: {train: train.jsonl, test: held.jsonl}\neval_strategy: steps\n"
    found = translated(tmp_path, OtherTrainer.TRL, text)
    math, own, form = found.settings["reward.use"]
    assert (math, form["kind"], form["weight"]) == ("math", "format", 0.2), "each has its own weight"
    assert own == {"kind": "function", "path": "mine.py:bonus", "weight": 0.5}
    columns = {"answer": "solution"}
    assert found.settings["data.train"] == {"path": "train.jsonl", "columns": columns}
    assert found.settings["eval.sets"] == {"heldout": {"path": "held.jsonl", "columns": columns}}


@pytest.mark.parametrize(
    ("funcs", "terms", "is_missing"),
    [
        ("[rewards.sort_reward, think_format_reward]", "rewards.py:sort_reward stops the run until you", False),
        ("mine.math.bonus", "mine/math.py:bonus stops the run until", False),
        ("[my_reward, think_format_reward]", "my_reward: no counterpart, and a run would train on the rest", True),
        ("[org/reward-model.v2]", "org/reward-model.v2: no counterpart", True),
        ("[accuracy_reward]\nreward_weights: [1, 2]", "reward_weights: needs a number for each", True),
        ("[accuracy_reward]", "", False),
    ],
)
def test_a_reward_of_their_own_never_disappears(funcs, terms, is_missing, tmp_path):
    found = translated(tmp_path, OtherTrainer.TRL, f"reward_funcs: {funcs}\n")
    assert found.terms.startswith(terms)
    assert bool(found.terms) == bool(terms)
    assert found.is_missing == is_missing
    assert ("reward.use" in found.settings) != is_missing


def test_a_reward_function_of_verl_becomes_a_term(tmp_path):
    text = "custom_reward_function: {path: mine/reward.py}\ndata: {train_batch_size: 8}\n"
    found = translated(tmp_path, OtherTrainer.VERL, text)
    assert found.settings["reward.use"] == ["mine/reward.py:compute_score"]
    assert found.terms.startswith("mine/reward.py:compute_score stops the run")


@pytest.mark.parametrize(("text", "processes", "prompts"), [("", 1, 4), ("", 8, 32), ("num_processes: 2\n", 8, 8)])
def test_a_batch_of_trl_counts_all_processes_and_says_so(text, processes, prompts, tmp_path):
    (tmp_path / "grpo.yaml").write_text(
        f"per_device_train_batch_size: 8\ngradient_accumulation_steps: 4\nnum_generations: 8\n{text}"
    )
    found = translate(OtherTrainer.TRL, tmp_path / "grpo.yaml", processes=processes)
    assert found.settings["rollout.prompts_per_step"] == prompts
    assert (f"rollout.prompts_per_step={prompts};" in found.batch) == (not text), "the file says it itself"


REAL = (
    "adam_epsilon data_seed dataset_num_proc eval_delay eval_accumulation_steps fp16_full_eval generation_kwargs"
    " hub_strategy load_in_4bit logging_dir lora_modules_to_save lora_task_type lr_scheduler_kwargs"
    " max_tool_calling_iterations num_generations_eval optim push_to_hub_token save_on_each_node tf32"
    " top_entropy_quantile use_cpu use_dora use_liger_kernel use_rslora vllm_enable_sleep_mode"
    " vllm_importance_sampling_cap vllm_model_impl vllm_server_host vllm_server_port vllm_structured_outputs_regex"
)


def test_a_misspelt_key_is_refused_and_a_real_one_is_not(tmp_path):
    with pytest.raises(ConfigError, match=r"learning_rat=1e-05: .*; did you mean learning_rate\?") as caught:
        translated(tmp_path, OtherTrainer.TRL, "max_steps: 3\nlearning_rat: 1.0e-5\n")
    assert "\n" not in str(caught.value)
    lines = "".join(f"{name}: 1\n" for name in REAL.split())
    assert len(translated(tmp_path, OtherTrainer.TRL, f"max_steps: 3\n{lines}").lost) >= len(REAL.split())
    with pytest.raises(ConfigError, match=r"did you mean actor_rollout_ref\.rollout\.temperature\?"):
        translated(tmp_path, OtherTrainer.VERL, "actor_rollout_ref.rollout.temprature=0.7 data.seed=1\n", "run.sh")


@pytest.mark.parametrize(
    ("trainer", "text", "words"),
    [
        (OtherTrainer.TRL, "steps: 3\n", "has no setting of trl that is known here"),
        (OtherTrainer.TRL, "- 1\n", "holds no settings"),
        (OtherTrainer.VERL, "learning_rate: 1e-6\n", "has no setting of verl"),
    ],
)
def test_a_file_that_is_none_is_refused_in_one_line(trainer, text, words, tmp_path):
    with pytest.raises(ConfigError, match=words) as caught:
        translated(tmp_path, trainer, text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("yes", "no"), [("true", "false"), ("on", "off"), ("yes", "no")])
def test_the_words_of_yaml_1_1_are_booleans_in_files_of_others(tmp_path, yes, no):
    trl = f"dataset_name: a/b\nuse_peft: {yes}\nlora_r: 8\nscale_rewards: {no}\neval_strategy: {no}\n"
    trl += f"mask_truncated_completions: {yes}\n"
    found = translated(tmp_path, OtherTrainer.TRL, trl).settings
    assert found["learner.lora.rank"] == 8
    assert (found["algorithm.advantage"], found["algorithm.truncated"]) == ("group_mean", "mask")
    assert "eval.sets" not in found
    verl = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"
    verl += f" algorithm.norm_adv_by_std_in_grpo={no} actor_rollout_ref.actor.use_kl_loss={yes}"
    verl += " actor_rollout_ref.actor.kl_loss_coef=0.02\n"
    found = translated(tmp_path, OtherTrainer.VERL, verl, "run.sh").settings
    assert (found["algorithm.advantage"], found["algorithm.kl_coef"]) == ("group_mean", 0.02)
