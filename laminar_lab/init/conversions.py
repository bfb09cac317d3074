"""From settings of TRL and verl to ours: the functions of the table in `laminar_lab.init.counterparts`.

A function gets a file's settings, with that trainer's defaults below them, and the names of one setting there. It
returns our value, or None where our default stands, and raises `NoCounterpartError`. Files are flat here:
`actor_rollout_ref.rollout.n`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from laminar_py.config.their_names import ACTOR, MODEL, ROLLOUT

TRL_REWARDS: dict[object, object] = {
    "accuracy_reward": "math",
    "think_format_reward": {"kind": "format", "pattern": "^<think>(?!.*<think>).*</think>"},
}

TO_ADAPT = "{} stops the run until you adapt it to def score(request) -> float, see docs/rewards.md"

Given = Mapping[str, object]
"""Settings of another trainer by dotted name, with its defaults below them."""

Names = Sequence[str]
Convert = Callable[[Given, Names], object]


class NoCounterpartError(Exception):
    """A value of another trainer has no counterpart; the message says what to do, and `instead` is used."""

    def __init__(self, reason: str, *, instead: object = None) -> None:
        super().__init__(reason)
        self.instead = instead


class MissingTermError(NoCounterpartError):
    """A term of the reward has no counterpart, so that a run would train on the other terms alone."""


def first(given: Given, names: Names) -> object:
    """Return the value of the first name that has one."""
    return next((given[name] for name in names if given.get(name) is not None), None)


def number(given: Given, name: str) -> float:
    """Return a setting as a number; 0 where it is missing."""
    value = given.get(name)
    try:
        return float(str(value)) if value is not None else 0.0
    except ValueError:
        raise NoCounterpartError(f"{name}={value} is no number") from None


def _whole(given: Given, name: str) -> int | None:
    """Return a positive setting as a whole number, else None."""
    value = number(given, name)
    if 0 < value < 1:
        raise NoCounterpartError(f"{name} is a share; give a number of steps")
    return int(value) if value > 0 else None


def _truth(given: Given, name: str) -> bool:
    return str(given.get(name)).lower() in ("true", "1", "yes")


def positive(given: Given, names: Names) -> object:
    """Return a whole number; 0, -1 and the like leave our default."""
    return next((_whole(given, name) for name in names if given.get(name)), None)


def total(given: Given, names: Names) -> object:
    return int(sum(number(given, name) for name in names)) or None


def coefficient(given: Given, names: Names) -> object:
    """Return a number other than 0, which leaves our default."""
    return number(given, names[0]) or None


def numbers(given: Given, names: Names) -> object:
    return [number(given, name) for name in names]


def group(given: Given, names: Names) -> object:
    """Return the samples of a prompt, of which a group needs two, except with a critic."""
    if given.get(names[0]) is not None and number(given, names[0]) < 2 and not has_critic(given):
        raise NoCounterpartError("a group has two samples at least; 8 are used")
    return _whole(given, names[0])


def choice(words: Mapping[str, object], other: str) -> Convert:
    """A word that has another word here. `other` says what to do about a word that has none."""

    def convert(given: Given, names: Names) -> object:
        word = str(given.get(names[0])).lower()
        if word not in words:
            raise NoCounterpartError(other)
        return words[word]

    return convert


def elsewhere(reason: str) -> Convert:
    """Settings that `laminar init` decides itself."""

    def convert(given: Given, names: Names) -> object:
        raise NoCounterpartError(reason)

    return convert


def when(value: object) -> Convert:
    """A switch: `value` where it is on, else our default."""
    return lambda given, names: value if _truth(given, names[0]) else None


def trackers(given: Given, names: Names) -> object:
    """Return trackers by their names, which are the same; others and the console are left out."""
    value = given.get(names[0])
    named = value if isinstance(value, list) else [value]
    return [one for one in named if one in ("tensorboard", "wandb", "mlflow")] or None


def _trl_batch(given: Given) -> tuple[int, int]:
    """Return the completions of a generation batch and of an optimizer step, over all processes."""
    step = int(number(given, "per_device_train_batch_size") * (number(given, "num_processes") or 1))
    update = step * int(number(given, "gradient_accumulation_steps") or 1)
    steps = number(given, "steps_per_generation")
    return int(number(given, "generation_batch_size") or step * steps or update), update


def trl_prompts(given: Given, names: Names) -> object:
    return max(1, _trl_batch(given)[0] // max(1, int(number(given, "num_generations"))))


def trl_updates(given: Given, names: Names) -> object:
    generated, update = _trl_batch(given)
    updates = max(1, generated // max(1, update))
    if number(given, "num_iterations") > 1:
        raise NoCounterpartError("a trajectory is trained once", instead=updates)
    return updates if updates > 1 else None


def verl_updates(given: Given, names: Names) -> object:
    prompts, mini = number(given, "data.train_batch_size"), number(given, f"{ACTOR}.ppo_mini_batch_size")
    updates = max(1, int(prompts // max(1, mini)))
    if number(given, f"{ACTOR}.ppo_epochs") > 1:
        raise NoCounterpartError("a trajectory is trained once", instead=updates)
    return updates if updates > 1 else None


FORMATS = ("json", "csv", "parquet", "text")
READ = (".jsonl", ".json", ".parquet")


def trl_data(given: Given, names: Names) -> object:
    answers = _trl_answers(given)
    mixed = given.get("datasets")
    if isinstance(mixed, list):
        named = [one for one in mixed if isinstance(one, dict) and "path" in one]
        sources = [
            _files(one.get("data_files"), split=str(one.get("split", "train")))
            if one["path"] in FORMATS
            else [_source(one["path"], subset=one.get("name"), split=one.get("split"))]
            for one in named
        ]
        return [source | answers for group in sources for source in group]
    if given.get("dataset_name") is None:
        return None
    split, subset = given.get("dataset_train_split"), given.get("dataset_config")
    if given["dataset_name"] in FORMATS:
        found = [file | answers for file in _files(given.get("data_files"), split=str(split or "train"))]
        return found[0] if len(found) == 1 else found
    return _source(given["dataset_name"], subset=subset, split=split) | answers


def _files(files: object, *, split: str) -> list[dict[str, object]]:
    """Return sources for `data_files` of a format: a file, a list of files, or either by split."""
    named = files.get(split) if isinstance(files, dict) else files
    paths = [str(one) for one in (named if isinstance(named, list) else [named]) if one]
    if not paths:
        raise NoCounterpartError("names a format, not a file; name yours with --data")
    unread = next((path for path in paths if Path(path).suffix not in READ or set("*:") & set(path)), None)
    if unread is not None:
        raise NoCounterpartError(f"{unread}: only paths of JSONL and Parquet files are read; name one with --data")
    return [{"path": path} for path in paths]


def _source(path: object, *, subset: object = None, split: object = None) -> dict[str, object]:
    """Return settings of a source, without our defaults."""
    named = {} if subset is None else {"subset": subset}
    return {"path": str(path), **named, **({} if split in (None, "train") else {"split": split})}


def trl_sets(given: Given, names: Names) -> object:
    if str(given.get("eval_strategy", "no")).lower() in ("no", "false") or given.get("dataset_name") is None:
        return None
    split, subset = given.get("dataset_test_split", "test"), given.get("dataset_config")
    if given["dataset_name"] in FORMATS:
        files = given.get("data_files")
        file, *others = _files(files if isinstance(files, dict) else None, split=str(split))
        if others:
            raise NoCounterpartError("a set here has one file; name yours with --heldout")
        return {"heldout": file | _trl_answers(given)}
    return {"heldout": _source(given["dataset_name"], subset=subset, split=split) | _trl_answers(given)}


def _trl_answers(given: Given) -> dict[str, object]:
    """Return the column of the answer that TRL's own reward reads."""
    return {"columns": {"answer": "solution"}} if "accuracy_reward" in str(given.get("reward_funcs")) else {}


def trl_eval_steps(given: Given, names: Names) -> object:
    return None if str(given.get("eval_strategy", "no")) != "steps" else _whole(given, names[0])


def verl_data(given: Given, names: Names) -> object:
    found = [_verl_source(path, given) for path in _paths(given.get("data.train_files"))]
    return (found[0] if len(found) == 1 else found) or None


def verl_sets(given: Given, names: Names) -> object:
    drawn = {
        ours: number(given, f"{ROLLOUT}.val_kwargs.{theirs}")
        for ours, theirs in (("samples", "n"), ("temperature", "temperature"))
        if given.get(f"{ROLLOUT}.val_kwargs.{theirs}") is not None
    }
    if not drawn.get("temperature"):
        drawn = {}  # greedy answers are all equal
    if "samples" in drawn:
        drawn["samples"] = int(drawn["samples"])
    paths = _paths(given.get("data.val_files"))
    names = ["heldout"] if len(paths) == 1 else [f"{Path(path).parent.name or 'heldout'}" for path in paths]
    if len(set(names)) < len(names):
        names = [f"heldout{place}" for place in range(len(names))]
    return {name: _verl_source(path, given) | drawn for name, path in zip(names, paths, strict=True)} or None


def _paths(value: object) -> list[str]:
    """Return files that verl names: one, or a list of them."""
    return [str(Path(str(one)).expanduser()) for one in (value if isinstance(value, list) else [value]) if one]


def _verl_source(path: str, given: Given) -> dict[str, object]:
    """Return settings for a file of verl, whose answers are below `reward_model`."""
    prompt = given.get("data.prompt_key", "prompt")
    columns = {"answer": "reward_model.ground_truth", "task": "data_source"}
    return {"path": path, "columns": columns if prompt == "prompt" else {"prompt": prompt, **columns}}


def trl_reward(given: Given, names: Names) -> object:
    found = given.get("reward_funcs")
    funcs = found if isinstance(found, list) else [found] if found else []
    weights = given.get("reward_weights") or [1.0] * len(funcs)
    if not isinstance(weights, list) or len(weights) != len(funcs):
        raise MissingTermError("reward_weights: needs a number for each of reward_funcs; correct it")
    made = [_trl_term(name) for name in funcs]
    unknown = [str(name) for name, term in zip(funcs, made, strict=True) if term is None]
    if given.get("reward_model_name_or_path"):
        unknown.append("reward_model_name_or_path")
    if unknown:
        raise MissingTermError(f"{', '.join(unknown)}: no counterpart, and a run would train on the rest alone")
    terms = [_weighted(term, weight) for term, weight in zip(made, weights, strict=True)]
    if own := [name for name in funcs if name not in TRL_REWARDS]:
        raise NoCounterpartError(TO_ADAPT.format(", ".join(str(_trl_term(name)) for name in own)), instead=terms)
    return terms or None


def _trl_term(name: object) -> object:
    """Return our term for a reward of TRL: its own, or a function in a module; None for any other."""
    if name in TRL_REWARDS:
        return TRL_REWARDS[name]
    module, dot, function = str(name).rpartition(".")
    is_function = dot and str(name).replace(".", "").isidentifier()
    return f"{module.replace('.', '/')}.py:{function}" if is_function else None


def verl_reward(given: Given, names: Names) -> object:
    path, function = (given.get(name) for name in names)
    if path is None:
        return None
    term = f"{path}:{function or 'compute_score'}"
    raise NoCounterpartError(TO_ADAPT.format(term), instead=[term])


def _weighted(term: object, weight: object) -> object:
    """Return a term with its weight in the sum, 1 by default."""
    settings = term if isinstance(term, dict) else {"kind": term}
    if isinstance(term, str) and ":" in term:
        settings = {"kind": "function", "path": term}
    return term if weight in (1, None) else settings | {"weight": weight}


def trl_max_len(given: Given, names: Names) -> object:
    """Return the most tokens of a trajectory; None where no prompt has a limit."""
    whole, prompt = (number(given, name) for name in names)
    return int(whole or (prompt and prompt + number(given, "max_completion_length"))) or None


def trl_lora(given: Given, names: Names) -> object:
    return _whole(given, names[-1]) if _truth(given, "use_peft") else None


def verl_lora(given: Given, names: Names) -> object:
    return _whole(given, names[0]) if number(given, f"{MODEL}.lora_rank") > 0 else None


def trl_targets(given: Given, names: Names) -> object:
    return _targets(given[names[0]]) if _truth(given, "use_peft") and names[0] in given else None


def verl_targets(given: Given, names: Names) -> object:
    return _targets(given[names[0]]) if number(given, f"{MODEL}.lora_rank") > 0 and names[0] in given else None


def _targets(named: object) -> object:
    """Return the projections with adapters; all of them is our default."""
    if named in (None, "all-linear", ["all-linear"]):
        return None
    if not isinstance(named, list):
        raise NoCounterpartError("give a list of projections, e.g. [q_proj, v_proj]")
    return named


def trl_warmup(given: Given, names: Names) -> object:
    steps, share = number(given, names[0]), number(given, names[1])
    if steps >= 1:  # goes before a share, as there
        return int(steps)
    share = steps or share
    if share and number(given, "max_steps") <= 0:
        raise NoCounterpartError("a share of steps, and the file counts epochs; set learner.warmup_steps")
    return math.ceil(share * number(given, "max_steps")) or None


def trl_scale(given: Given, names: Names) -> object:
    scale = str(given.get(names[0])).lower()
    if scale == "batch":
        raise NoCounterpartError("batch_std here also subtracts the mean of the step; group_std is used")
    return "group_mean" if scale in ("none", "false") else None


def verl_advantage(given: Given, names: Names) -> object:
    name = str(given.get("algorithm.adv_estimator"))
    estimators = {
        "grpo": "group_std",
        "rloo": "leave_one_out",
        "reinforce_plus_plus": "batch_std",
        "gae": "gae",
    }
    if name not in estimators:
        raise NoCounterpartError(f"{name} is unknown here; GRPO's group_std is used")
    if name == "grpo":
        return "group_mean" if str(given.get("algorithm.norm_adv_by_std_in_grpo")).lower() == "false" else None
    return estimators[name]


def has_critic(given: Given) -> bool:
    return given.get("algorithm.adv_estimator") == "gae"


def of_critic(given: Given, names: Names) -> object:
    """Return a setting of the critic, if there is one."""
    return first(given, names) if has_critic(given) else None


def verl_kl(given: Given, names: Names) -> object:
    return number(given, f"{ACTOR}.kl_loss_coef") if _truth(given, f"{ACTOR}.use_kl_loss") else None


def verl_kl_kind(given: Given, names: Names) -> object:
    kinds = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    kind = str(given.get(names[0]))
    if not _truth(given, f"{ACTOR}.use_kl_loss"):
        return None
    if kind not in kinds:
        raise NoCounterpartError("choose k1, k2 or k3")
    return None if kinds[kind] == "k3" else kinds[kind]


def trl_clip_high(given: Given, names: Names) -> object:
    """Return the upper clip; CISPO's `epsilon_high` bounds the ratio itself."""
    cispo = given.get("loss_type") == "cispo"
    if given.get("epsilon_high") is None:
        return None if cispo else given.get("epsilon")
    return number(given, "epsilon_high") - cispo


def trl_name(given: Given, names: Names) -> object:
    return "cispo" if given.get(names[0]) == "cispo" else None


def trl_clip_low(given: Given, names: Names) -> object:
    return None if given.get("loss_type") == "cispo" else given.get(names[0])
