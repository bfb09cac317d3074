"""The data and the tokenizer before a config is written: longest prompt, number of rows, chat template."""

from dataclasses import dataclass
from pathlib import Path

from laminar_py.config import RunConfig


@dataclass(frozen=True, slots=True)
class Seen:
    """Figures of the data, e.g. `Seen(rows=200, longest=86)`; None where they cannot be counted yet."""

    rows: int | None
    longest: int | None  # tokens of a prompt, also of evaluation sets


def has_template(model: Path) -> bool:
    """Return whether a model's tokenizer writes messages by a chat template."""
    settings = model / "tokenizer_config.json"
    return (model / "chat_template.jinja").is_file() or (
        settings.is_file() and '"chat_template"' in settings.read_text()
    )


def look(config: RunConfig) -> Seen:
    """Count rows and tokens, and check that rows have what the reward needs. Raises `ConfigError`.

    Data on the hub is not loaded, and without a tokenizer nothing is counted.
    """
    from laminar_py.data import PromptEncoder, load_tokenizer
    from laminar_py.runtime.preflight import check_problems, read_problems

    sources = [*config.data.train, *config.eval.sets.values()]
    if any(source.is_hub_name for source in sources) or not (config.model.path / "tokenizer.json").is_file():
        return Seen(None, None)
    encoder = PromptEncoder(load_tokenizer(config.model.path), config.model.path, config.data.chat, None)
    problems = read_problems(config, encoder, limited=False)
    check_problems(config.reward, problems.all)
    longest = max(int(one.lengths().max()) for one in problems.all if len(one))
    return Seen(sum(len(one) for one in problems.train), longest)
