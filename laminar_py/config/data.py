"""Settings of the prompts."""

from pathlib import Path

from laminar_py.config.section import Section


class DataConfig(Section):
    """Sources of prompts."""

    train: Path
    """JSONL with a `prompt` in each line, and what its reward needs: mostly an `answer`, perhaps `tests` or other
    fields, which rewards get as they are. Perhaps `id` and `task` too: reports tell tasks apart, and each may have
    a reward of its own. Each epoch is shuffled anew from `seed`. A prompt is tokenized as it stands, after what
    the tokenizer's own post-processor puts before a text, a BOS for one; a chat template has to be applied
    already."""
    heldout: Path | None = None
    """JSONL of the same form for evaluation; none of its prompts may occur in `train`."""
    prepare: Path | None = None
    """Python script that makes the files of this run where they are missing; runs before anything else."""
