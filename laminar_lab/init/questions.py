"""The questions of `laminar init`: an option or a foreign file answers them, else the user on a terminal."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

from laminar_lab.init.choices import HERE, Choices, Engine, Settings, fleet_of
from laminar_lab.plan.known_models import model_named
from laminar_py.cli import print_line
from laminar_py.config import ConfigError

LORA, FULL = "lora", "full"
PLAIN_REWARDS = ("math", "code")  # kinds that need no setting
FILES = (".jsonl", ".parquet")


def _one_of(*words: str) -> Callable[[str, str], None]:
    def check(option: str, answer: str) -> None:
        if answer not in words:
            raise ConfigError(f"--{option}={answer}: choose {' or '.join(words)}")

    return check


def _check_place(option: str, answer: str) -> None:
    if answer != HERE:
        fleet_of(answer)


def _check_file(option: str, answer: str) -> None:
    if Path(answer).suffix in FILES and not Path(answer).is_file():
        raise ConfigError(f"--{option}={answer}: no such file; name a JSONL or Parquet file")


def _check_model(option: str, answer: str) -> None:
    if not Path(answer).is_dir():
        model_named(answer)


def _check_reward(option: str, answer: str) -> None:
    for term in answer.split(","):
        _check_term(option, term)


def _check_term(option: str, answer: str) -> None:
    file, colon, function = answer.partition(":")
    if colon and not (Path(file).is_file() and function):
        raise ConfigError(f"--{option}={answer}: no such file; write math, code, or file.py:function")
    if not colon and answer not in PLAIN_REWARDS:
        raise ConfigError(
            f"--{option}={answer}: write math, code, or file.py:function; other kinds have settings, which"
            " docs/rewards.md explains"
        )


def _accept(option: str, answer: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Question:
    """A question, e.g. `Question("data", "problems", check=_check_file)`; without a default it needs an answer."""

    text: str
    default: str | None = None
    key: str = ""  # setting of a foreign file that answers it
    check: Callable[[str, str], None] = _accept  # of option and answer; raises `ConfigError`


QUESTIONS = {
    "model": Question("model folder, or for GPUs a size such as 7B", key="model.path", check=_check_model),
    "data": Question("problems, a JSONL or Parquet file", key="data.train", check=_check_file),
    "heldout": Question("held-out problems (none: no evaluation)", "", key="eval.sets", check=_check_file),
    "reward": Question(
        "reward: math, code, or file.py:function; several with commas",
        "math",
        key="reward.use",
        check=_check_reward,
    ),
    "train": Question("train lora or full", LORA, check=_one_of(LORA, FULL)),
    "on": Question("run here, on cores, or on GPUs such as 8xH100", HERE, check=_check_place),
    "engine": Question("engine: embedded or sglang", Engine.EMBEDDED.value, check=_one_of(*Engine)),
}


def choose(options: Mapping[str, str | None], given: Settings, *, translated: bool) -> dict[str, str]:
    """Return an answer to each question that `given`, the settings of a foreign file, leaves open.

    An option takes the place of a given setting, which is removed. Raises `ConfigError` for a wrong answer, and
    for a missing one where no terminal can be asked.
    """
    usual = dict(options)
    if translated and usual["train"] is None:
        usual["train"] = LORA if "learner.lora.rank" in given else FULL
    answers: dict[str, str] = {}
    for option, question in QUESTIONS.items():
        if option == "engine" and answers["on"] != HERE:
            usual["engine"] = usual["engine"] or Engine.SGLANG  # the embedded one computes on cores
        answer = usual[option]
        if answer is not None:
            given.pop(question.key, None)
            question.check(option, answer)
            answers[option] = answer
        elif question.key not in given:
            answers[option] = answer_of(option)
    if answers["train"] == FULL:
        for key in [key for key in given if key.startswith("learner.lora.")]:
            del given[key]
    return answers


def answer_of(option: str) -> str:
    """Ask an option's question until the answer is right; without a terminal take the default."""
    question = QUESTIONS[option]
    if not sys.stdin.isatty():
        if question.default is None:
            raise ConfigError(f"--{option}: missing; name the {question.text}")
        return question.default
    while True:
        answer = str(typer.prompt(question.text, default=question.default, show_default=bool(question.default)))
        try:
            question.check(option, answer.strip())
        except ConfigError as error:
            print_line(str(error), style="red")
        else:
            return answer.strip()


def make_choices(answers: Mapping[str, str], given: Settings, *, name: str, python: str | None) -> Choices:
    """Return the choices that answers and given settings make."""
    return Choices(
        name=name,
        model=answers.get("model") or str(given["model.path"]),
        data=answers.get("data", ""),
        heldout=answers.get("heldout") or None,
        reward=answers.get("reward", ""),
        lora=answers["train"] == LORA,
        on=answers["on"],
        engine=Engine(answers["engine"]),
        python=python,
        given=given,
    )
