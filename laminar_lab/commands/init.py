"""`laminar init`: write the config of a run from a few answers, or from a file of TRL or verl."""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laminar_py.cli import print_line
from laminar_py.config import ConfigError
from laminar_py.config.their_names import OtherTrainer
from laminar_py.records.host import counted

if TYPE_CHECKING:
    from laminar_lab.init.choices import Choices
    from laminar_lab.init.translation import Translation

MOST_LOST = 40  # settings without a counterpart that are printed
app = typer.Typer()


@app.command(epilog="Example: laminar init mine.yaml --model models/SmolLM2-135M --data train.jsonl --lora")
def init(
    out: Annotated[Path, typer.Argument(help="New YAML file")] = Path("mine.yaml"),
    model: Annotated[str | None, typer.Option(help="Model folder; for GPUs also a size such as 7B")] = None,
    data: Annotated[str | None, typer.Option(help="JSONL or Parquet file with `prompt` and `answer`")] = None,
    heldout: Annotated[str | None, typer.Option(help="The same, of held-out rows")] = None,
    reward: Annotated[
        list[str] | None, typer.Option(help="math, code, or file.py:function; give it again for a further term")
    ] = None,
    lora: Annotated[bool | None, typer.Option("--lora/--full", help="Train adapters, or all weights")] = None,
    on: Annotated[str | None, typer.Option(help="here: this machine's cores; or GPUs such as 8xH100")] = None,
    engine: Annotated[str | None, typer.Option(help="embedded, on cores; or sglang, on both")] = None,
    python: Annotated[str | None, typer.Option("--sglang-python", help="Interpreter that has SGLang")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; default: of the new file")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Learner steps; default: 200")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate; default: by the model's size")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Cap on a response; default: 256 here, 4096 on GPUs")
    ] = None,
    source: Annotated[
        tuple[OtherTrainer, Path] | None,
        typer.Option("--from", metavar="trl|verl FILE", help="TRL's YAML; verl's YAML or script of overrides"),
    ] = None,
) -> None:
    """Write a short commented config that runs.

    On a terminal it asks for what no option says. With --from it translates a file of TRL or verl, and lists the
    settings that have no counterpart here.
    """
    from laminar_lab.init.choices import Engine, check_place
    from laminar_lab.init.questions import FULL, LORA, choose, make_choices
    from laminar_lab.init.translation import drop_cut

    if out.exists():
        raise ConfigError(f"{out}: exists already; name another file, or delete it")
    options = {"model": model, "data": data, "heldout": heldout, "reward": ",".join(reward) if reward else None}
    options |= {"train": None if lora is None else LORA if lora else FULL, "on": on, "engine": engine}
    translation = None if source is None else _translate(source, options)
    given = {} if translation is None else translation.settings
    chosen = {"name": name, "steps": steps, "learner.lr": lr, "rollout.sampling.max_new_tokens": max_new_tokens}
    given |= {key: value for key, value in chosen.items() if value is not None}
    answers = choose(options, given, translated=translation is not None)
    choices = make_choices(answers, given, name=out.stem, python=python)
    check_place(choices)
    epochs = None if translation is None or steps is not None else translation.epochs
    cut = drop_cut(given) if choices.engine is Engine.SGLANG else {}
    if not _write(out, choices, epochs=epochs) and epochs is not None:
        cut[f"{epochs:g} epochs"] = "the rows cannot be counted; set steps"
    if translation is not None:
        _print_lost(translation, cut)
    _print_next(out, choices)


def _translate(source: tuple[OtherTrainer, Path], options: dict[str, str | None]) -> "Translation":
    """Translate a foreign file, for as many processes as `--on` names GPUs. `--on` is asked for where it is open.

    Raises `ConfigError` if a term of the reward has no counterpart, and `--reward` names no other.
    """
    from laminar_lab.init.choices import HERE, fleet_of
    from laminar_lab.init.questions import answer_of
    from laminar_lab.init.translation import translate

    on = options["on"] = options["on"] or answer_of("on")
    made = translate(*source, processes=1 if on == HERE else fleet_of(on).gpus)
    where, reward = f"--from {source[0]} {source[1]}", options["reward"]
    if reward is not None and "reward.use" in made.settings:
        replaced = f"--reward={reward} takes the place of the reward in {source[1]}: {made.settings['reward.use']}"
        return replace(made, terms=replaced)
    if reward is not None:
        return replace(made, terms="")
    if made.is_missing:
        raise ConfigError(f"{where}: {made.terms}; or name your reward by --reward, e.g. --reward reward.py:score")
    return made


def _write(out: Path, choices: "Choices", *, epochs: float | None) -> bool:
    """Write the config. Return whether prompts and rows were counted: data and tokenizer must be here."""
    from laminar_lab.init.choices import settings_of
    from laminar_lab.init.look import has_template, look
    from laminar_lab.init.text import commented, to_tree
    from laminar_py.config import parse_config

    if has_template(choices.folder) or not choices.folder.exists():  # a model to download, most likely of chats
        choices = replace(choices, given={"data.chat.texts": True, **choices.given})
    seen = look(parse_config(to_tree(settings_of(choices, prompt_tokens=None))))
    settings = settings_of(choices, prompt_tokens=seen.longest)
    if epochs is not None and seen.rows is not None:
        settings["steps"] = max(1, math.ceil(epochs * seen.rows / int(str(settings["rollout.prompts_per_step"]))))
    parse_config(to_tree(settings))
    head = f"Written by `laminar init`; docs/config.md has every setting. Run: laminar train {out}"
    try:
        out.write_text(commented(settings, head=head))
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror}); name another file") from None
    return seen.rows is not None


def _print_lost(translation: "Translation", more: dict[str, str]) -> None:
    """Print what to know of a foreign file: its reward, its batch, settings without a counterpart, and `more`."""
    for line in filter(None, (translation.terms, translation.batch)):
        print_line(line, style="yellow")
    lost = more | translation.lost
    if lost:
        print_line(f"without a counterpart here: {counted(len(lost), 'setting')}")
    for name, reason in sorted(lost.items(), key=lambda one: not one[1])[:MOST_LOST]:
        print_line(f"  {name}: {reason or 'not known here'}")
    if len(lost) > MOST_LOST:
        print_line(f"  and {len(lost) - MOST_LOST} more")


def _print_next(out: Path, choices: "Choices") -> None:
    """Print the commands that come next."""
    from laminar_lab.init.choices import HERE

    print_line(f"{out}: look at it, then")
    if choices.on != HERE:
        pretend = choices.on if choices.on.count("x") > 1 else f"1x{choices.on}"
        if not (choices.folder / "config.json").is_file():
            print_line(f"  put the model into {choices.folder}")
        print_line(f"  laminar doctor {out} --pretend {pretend}   # what each GPU holds")
    print_line(f"  laminar data {out}      # prompts as the model reads them")
    print_line(f"  laminar train {out}")
