"""Names of results in the cache of warm starts, without torch: checks before a run look there."""

from pathlib import Path

import msgspec
from blake3 import blake3

from laminar_contrib.supervised.settings import SupervisedConfig
from laminar_py.config import EnvironmentConfig
from laminar_py.config.data import ChatConfig, ModelConfig, SourceConfig

RECIPE_VERSION = 3  # raise it with every change of `training` or of a demonstration's tokens
# files that decide a demonstration's text and its end, if the folder has them
TEXT_FILES = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def cached_folder(
    model: ModelConfig,
    settings: SupervisedConfig,
    *,
    seed: int,
    chat: ChatConfig,
    environment: EnvironmentConfig | None,
) -> Path:
    """Return the folder of a result, named by a BLAKE3 digest of all inputs: files by content, hub data by name.

    `environment` defines tools, which the chat template or the system message writes into demonstrations.
    """
    weights = "from_scratch"
    if not model.from_scratch:
        weights = "".join(_file_digest(path) for path in sorted(model.path.glob("*.safetensors")))
    depends_on = (
        RECIPE_VERSION,
        _file_digest(model.path / "config.json"),
        _file_digest(model.path / "tokenizer.json"),
        weights,
        *_data_digests(settings.data),
        settings.steps,
        settings.tokens_per_step,
        settings.peak_lr(model),
        seed,
        chat.model_dump_json(),
        None if environment is None else (environment.definitions, environment.system_text),
        *((name, _file_digest(model.path / name)) for name in TEXT_FILES if (model.path / name).is_file()),
    )
    return settings.cache / blake3(msgspec.json.encode(depends_on)).hexdigest(length=16)


def _data_digests(source: SourceConfig) -> list[str]:
    """Return the inputs of `cached_folder` that come from a data source: its settings, then its data.

    Hub data is given by name, a file by its digest, a folder by the name and digest of each file.
    """
    path, settings = Path(source.path), source.model_dump_json(exclude={"path"})
    if source.is_hub_name:
        return [settings, source.path]
    if not path.is_dir():
        return [settings, _file_digest(path)]
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return [settings, *(text for file in files for text in (str(file.relative_to(path)), _file_digest(file)))]


def _file_digest(path: Path) -> str:
    digest: str = blake3().update_mmap(path).hexdigest()
    return digest
