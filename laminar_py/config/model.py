"""Settings of the model and of the supervised phase before RL."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from laminar_py.config.section import Count, Section


class ModelConfig(Section):
    """The model that is trained: a Hugging Face folder."""

    path: Path
    """Folder with `config.json`, `tokenizer.json` and, unless `from_scratch`, safetensors."""
    from_scratch: bool = False
    """Initialise the weights from `seed` instead of loading them; the folder needs no safetensors then."""


class WarmStartConfig(Section):
    """A short supervised phase before RL; its result is cached by the hash of all that it depends on."""

    data: Path
    """JSONL with `prompt` and `response` in each line."""
    steps: Count = 500
    """Optimizer steps."""
    tokens_per_step: Count = 1024
    """Tokens of prompts and responses in one step, at most."""
    lr: Annotated[float, Field(gt=0)] = 4e-3
    """Peak learning rate: linear warm-up over 20 steps, linear decay over the last 40 %."""
    cache: Path = Path(".cache/warm_start")
    """Folder that keeps finished warm starts."""
