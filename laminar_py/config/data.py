"""Settings of the prompts."""

from pathlib import Path

from laminar_py.config.section import Section


class DataConfig(Section):
    """Sources of prompts."""

    train: Path
    """JSONL with `prompt` and `answer` in each line, perhaps `id` and `task` too; each epoch is shuffled anew from
    `seed`, and reports tell tasks apart. A prompt is tokenized as it stands, after what the tokenizer's own
    post-processor puts before a text, a BOS for one; a chat template has to be applied already."""
    heldout: Path | None = None
    """JSONL of the same form for evaluation; none of its prompts may occur in `train`."""
    prepare: Path | None = None
    """Python script that makes the files of this run where they are missing; runs before anything else."""
