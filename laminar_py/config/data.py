"""Settings of the data, of the model, and of the supervised phase before RL."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field, JsonValue

from laminar_py.config.section import Count, Section, Share

PACKED = {".gz", ".zst", ".xz", ".bz2", ".zip"}
# suffixes that no name of a data set on the hub has
FILES = {".jsonl", ".json", ".parquet", ".arrow", ".csv", ".tsv", ".txt", *PACKED}


class SourceConfig(Section):
    """Problems of one source, e.g. `{path: train.jsonl}`, or just that path."""

    path: str
    """JSONL file, Parquet file, local folder of Hugging Face `datasets`, or name of a data set on its hub. A
    problem has a `prompt` (text, or a list of messages) or `messages`, and the fields that its reward needs:
    mostly an `answer`, or `tests` and others, which rewards get as they are. It may have an `id` and a `task`:
    reports tell tasks apart, and each task may have a reward of its own."""
    split: str = "train"
    """Split of a folder or a data set on the hub."""
    subset: str | None = None
    """Subset (configuration) of a data set on the hub, where it has several."""
    revision: str | None = None
    """Commit, branch or tag of a data set on the hub; only a commit has the same rows forever."""
    columns: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it
    """Our field -> your column, e.g. `{prompt: question, answer: solution.value}`. A dot goes into a column of
    objects."""
    task: str | None = None
    """Task of all problems from this source, in place of their own field `task`."""

    @property
    def is_hub_name(self) -> bool:
        """True if `path` looks like a name on the hub (`owner/name` or `name`) and no such path exists here."""
        path, parts = Path(self.path), self.path.split("/")
        named = len(parts) <= 2 and all(parts) and parts[0][0] not in ".~" and path.suffix not in FILES
        return named and not path.exists() and not (len(parts) == 2 and path.parent.exists())


class TrainSourceConfig(SourceConfig):
    """Problems to train on: one source, just its path, or a list of sources."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of groups from this source, relative to the weights of the others."""


def read_source(value: Any) -> Any:
    """Turn a source that is only a path into settings; return other values unchanged."""
    return {"path": value} if isinstance(value, str) else value


def read_sources(value: Any) -> Any:
    """Turn one source, or a list of sources, into a tuple of settings; a source may be only a path."""
    return tuple(read_source(source) for source in (value if isinstance(value, list | tuple) else (value,)))


AnySources: TypeAlias = Annotated[
    tuple[TrainSourceConfig, ...], BeforeValidator(read_sources), Field(min_length=1)
]


class ChatConfig(Section):
    """How messages become text: by the chat template of the model's tokenizer."""

    system: str | None = None
    """System message for conversations without one."""
    arguments: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies it
    """Arguments of the template, e.g. `{enable_thinking: false}`."""
    texts: bool = False
    """Turn a text prompt into a message of the user. If false, the text is tokenized as it stands, behind the
    beginning that the tokenizer's post-processor adds, e.g. a BOS."""


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
    """Python script that makes missing files of this run. Every command that reads the run's data runs the script
    first, without arguments, in the working directory."""
    chat: ChatConfig = ChatConfig()
    """Prompts that are messages, also of evaluation sets and of the warm start."""
    order: PromptOrder = PromptOrder.SHUFFLED
    """`shuffled`: a new permutation in each epoch, from `seed`. `curriculum`: shuffled among open levels; in each
    source the lowest level is open, and a level opens when all levels below are solved. `signal`: shuffled, but a
    problem whose last n groups had equal rewards comes with probability max(`rest_floor`, 2^-n); else a random
    problem of its source takes the place."""
    level: str = "level"
    """Field with the level of a problem, a number or a text, for `order: curriculum`."""
    level_groups: Count = 32
    """`curriculum`: number of a level's last groups by which it is judged."""
    opens_at: Share = 0.5
    """`curriculum`: share of solved responses in these groups that opens the next level."""
    solved_at: float = 1.0
    """`curriculum`: a response with at least this reward solves its problem."""
    rest_floor: Share = 0.0625
    """`signal`: lowest probability of a problem."""


class ModelConfig(Section):
    """The model that is trained: a Hugging Face folder."""

    path: Path
    """Folder with `config.json`, `tokenizer.json` and, unless `from_scratch`, safetensors."""
    from_scratch: bool = False
    """Initialise the weights from `seed` instead of loading safetensors."""
