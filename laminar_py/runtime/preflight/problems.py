"""Problems of a run, from all its sources; one of them as the model gets it. For `inputs` and `laminar data`."""

from dataclasses import dataclass

from laminar_py.config.data import SourceConfig
from laminar_py.config.run import RunConfig
from laminar_py.data.chat import PromptEncoder
from laminar_py.data.demonstrations import Demonstrations, read_demonstrations
from laminar_py.data.problems import ProblemSet, read_prompts
from laminar_py.data.sources import DataSource
from laminar_py.data.tokenizer import Tokenizer
from laminar_py.records.host import visible
from laminar_py.records.trajectory import Prompt

SHOWN_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Problems:
    """Problems of each source of `data.train` and of each set of `eval`."""

    train: list[ProblemSet]
    sets: dict[str, ProblemSet]

    @property
    def all(self) -> list[ProblemSet]:
        """Sources and sets."""
        return [*self.train, *self.sets.values()]

    @property
    def digests(self) -> dict[str, str]:
        """Digest of each one's rows, by its field of the config."""
        return {problems.source.field: problems.digest for problems in self.all}


def prompt_room(config: RunConfig) -> dict[str, int]:
    """Tokens of a prompt that leave room for a whole response, by evaluation set, and under "" in training."""
    run = config.rollout.sampling.params()
    caps = {name: one.sampling(run).max_new_tokens for name, one in config.eval.sets.items()}
    caps[""] = config.rollout.sampling.max_new_tokens
    return {name: config.rollout.max_len - cap for name, cap in caps.items()}


def read_problems(config: RunConfig, encoder: PromptEncoder, *, limited: bool, trains: bool = True) -> Problems:
    """Read what a run evaluates, and what it trains on if it `trains`. Raises `ConfigError`.

    `limited` refuses prompts without room for a whole response. Sources may use the same ids; in the ledger each
    problem has one of its own.
    """
    given = config.data.train if trains else ()
    room = prompt_room(config)

    def read(field: str, settings: SourceConfig, prefix: str, name: str) -> ProblemSet:
        limit = room[name] if limited else None
        source = DataSource(field, settings)
        return read_prompts(source, encoder=encoder, max_prompt_tokens=limit, prefix=prefix)

    if len(given) == 1:
        train = [read("data.train", given[0], "", "")]
    else:
        train = [read(f"data.train.{index}", one, f"train.{index}/", "") for index, one in enumerate(given)]
    sets = {name: read(f"eval.sets.{name}", one, f"{name}/", name) for name, one in config.eval.sets.items()}
    return Problems(train, sets)


def read_warm_start(config: RunConfig, encoder: PromptEncoder, *, limited: bool) -> Demonstrations | None:
    """Read the demonstrations of a run; None without a warm start. Raises `ConfigError`.

    `limited` refuses those that are longer than a step of the warm start.
    """
    settings = config.warm_start
    if settings is None:
        return None
    source = DataSource("warm_start.data", settings.data)
    limit = settings.tokens_per_step if limited else None
    return Demonstrations(source, read_demonstrations(source, encoder=encoder, max_tokens=limit))


def shown_prompt(prompt: Prompt, tokenizer: Tokenizer) -> str:
    """Lines with a prompt as the model gets it, control characters visible, and what ends a response to it."""
    ends = " or ".join(f"{tokenizer.word(id)!r} (id {id})" for id in tokenizer.eos_ids)
    text = prompt.text[:SHOWN_CHARS] + ("..." if len(prompt.text) > SHOWN_CHARS else "")
    indented = "\n".join(f"  {visible(line)}" for line in text.split("\n"))
    return f"prompt {prompt.id}, {len(prompt.ids)} tokens; a response ends with {ends}\n{indented}"
