"""Settings of data, of the model, and of the supervised phase before RL."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from laminar_py.config.section import ConfigError, Count, Section, Share

PACKED = {".gz", ".zst", ".xz", ".bz2", ".zip"}
FILES = {".jsonl", ".json", ".parquet", ".arrow", ".csv", ".tsv", ".txt", *PACKED}  # no name on the hub ends so


class SourceConfig(Section):
    """Problems of one source, e.g. `{path: train.jsonl}`, or just that path."""

    path: str
    """JSONL file, Parquet file, local folder of Hugging Face `datasets`, or name of a data set on its hub. A
    problem has a `prompt`, text or a list of messages (or the latter as `messages`), and what its reward needs:
    mostly an `answer`, perhaps `tests` or other fields, which rewards get as they are. Perhaps `id` and `task`
    too: reports tell tasks apart, and each may have a reward of its own."""
    split: str = "train"
    """Split of a folder or a data set on the hub."""
    subset: str | None = None
    """Subset (configuration) of a data set on the hub, where it has several."""
    revision: str | None = None
    """Commit, branch or tag of a data set on the hub; a commit is the same rows for ever."""
    columns: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it
    """Names of our fields and of the columns that hold them, e.g. `{prompt: question, answer: solution.value}`. A
    dot goes into a column of objects."""
    task: str | None = None
    """Task of all problems of this source, in place of what they say."""

    @property
    def is_hub_name(self) -> bool:
        """True for what reads as the name of a data set on the hub, and is neither here nor in a folder here."""
        path, parts = Path(self.path), self.path.split("/")
        named = len(parts) <= 2 and all(parts) and parts[0][0] not in ".~" and path.suffix not in FILES
        return named and not path.exists() and not (len(parts) == 2 and path.parent.exists())


class TrainSourceConfig(SourceConfig):
    """Problems to train on: one source, just its path, or a list of sources."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the groups that are of this source, against the weights of the others."""


def read_source(given: Any) -> Any:
    """Settings of a source that is given as no more than its path."""
    return {"path": given} if isinstance(given, str) else given


def read_sources(given: Any) -> Any:
    """Settings of sources that may be given as one."""
    return tuple(read_source(one) for one in (given if isinstance(given, list | tuple) else (given,)))


AnySources: TypeAlias = Annotated[
    tuple[TrainSourceConfig, ...], BeforeValidator(read_sources), Field(min_length=1)
]


class ChatConfig(Section):
    """How messages become text: by the chat template of the model's tokenizer."""

    system: str | None = None
    """System message, in front of messages that have none."""
    arguments: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies it
    """Arguments of the template, e.g. `{enable_thinking: false}`."""
    texts: bool = False
    """Take a prompt that is text for a message of the user. If false it is tokenized as it stands, after what the
    tokenizer's own post-processor puts before a text, a BOS for one."""


class PromptOrder(StrEnum):
    """Order in which problems come."""

    SHUFFLED = "shuffled"
    CURRICULUM = "curriculum"
    SIGNAL = "signal"


class DataConfig(Section):
    """Problems to train on."""

    train: AnySources
    """Source of the problems, or a list of them."""
    prepare: Path | None = None
    """Python script that makes the files of this run where they are missing. Every command that reads its data
    runs it first, without arguments, in the working directory."""
    chat: ChatConfig = ChatConfig()
    """Prompts that are messages; of evaluation sets and the warm start too."""
    order: PromptOrder = PromptOrder.SHUFFLED
    """`shuffled`: each epoch anew from `seed`. `curriculum`: shuffled too, among the levels that are open; in each
    source the lowest is, and a level is once each one below is solved. `signal`: shuffled too, but a problem whose
    last n groups had equal rewards comes with probability max(`rest_floor`, 2^-n), else another one of its source
    in its place."""
    level: str = "level"
    """Field of a problem that has its level, a number or a text, for `order: curriculum`."""
    level_groups: Count = 32
    """Groups of a level, the last ones, by which it is judged."""
    opens_at: Share = 0.5
    """Share of solved responses in these from which on the next level is open."""
    solved_at: float = 1.0
    """Reward from which on a response solves its problem."""
    rest_floor: Share = 0.0625
    """Lowest probability of `order: signal`."""


class ModelConfig(Section):
    """The model that is trained: a Hugging Face folder."""

    path: Path
    """Folder with `config.json`, `tokenizer.json` and, unless `from_scratch`, safetensors."""
    from_scratch: bool = False
    """Initialise the weights from `seed` instead of loading them; the folder needs no safetensors then."""


class DemonstrationConfig(SourceConfig):
    """Demonstrations: a source like those of `data.train`, or just its path, but without a `task`. A row has a
    `prompt`, text or a list of messages, and a `response`; or `messages` that end with the assistant's. A cached
    result knows a data set on the hub by its name alone."""


class WarmStartConfig(Section):
    """A short supervised phase before RL; its result is cached by the hash of all that it depends on."""

    data: Annotated[DemonstrationConfig, BeforeValidator(read_source)]
    """Demonstrations to imitate."""
    steps: Count = 500
    """Optimizer steps."""
    tokens_per_step: Count = 1024
    """Tokens of prompts and responses in one step, at most."""
    lr: Annotated[float, Field(gt=0)] = 4e-3
    """Peak learning rate: linear warm-up over 20 steps, linear decay over the last 40 %."""
    cache: Path = Path(".cache/warm_start")
    """Folder that keeps finished warm starts."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.data.task is not None:
            raise ConfigError(f"warm_start.data.task={self.data.task}: demonstrations have no task; leave it out")
        return self
