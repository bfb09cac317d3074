"""Export of a run's trajectories for other tools, as JSONL. `laminar audit RUN export` calls it.

A line has every column of the table `trajectory`, and with responses also prompt, token ids, log-probabilities and
spans. Memory holds one block of trajectories. The file gets its name when it is complete.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from laminar_lab.audit.queries import row_record
from laminar_lab.audit.stored import StoredResponses
from laminar_py.config.section import ConfigError
from laminar_py.ledger import reading, trajectory_rows
from laminar_py.ledger.segments import Payload
from laminar_py.records.trajectory import Prompt


def export(run: Path, out: Path, *, responses: bool = False) -> int:
    """Write all trajectories to a new JSONL file; return their number.

    Lines are in order of issue. Raises `ConfigError`.
    """
    if out.suffix != ".jsonl":
        raise ConfigError(f"out={out}: its suffix is not .jsonl; name a .jsonl file")
    if out.exists():
        raise ConfigError(f"out={out}: exists already; name a new file")
    if not out.parent.is_dir():
        raise ConfigError(f"out={out}: folder {out.parent} does not exist; create it")
    unfinished, encoder, count = out.with_name(f"{out.name}.tmp"), msgspec.json.Encoder(), 0
    try:
        with unfinished.open("wb") as file:
            for record in _records(run, responses):
                file.write(encoder.encode(record) + b"\n")
                count += 1
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def _records(run: Path, responses: bool) -> Iterator[dict[str, object]]:
    with reading(run) as connection:
        if not responses:
            yield from map(row_record, trajectory_rows(connection))
            return
        for row, prompt, payload in StoredResponses(run, connection).all_responses():
            yield row_record(row) | _response_record(prompt, payload)


def _response_record(prompt: Prompt | None, payload: Payload) -> dict[str, object]:
    """Return the exported columns of a response; columns of a missing prompt are empty."""
    return {
        "prompt_text": prompt.text if prompt else "",
        "answer": prompt.answer if prompt else "",
        "task": prompt.task if prompt else "",
        "prompt_ids": prompt.ids.tolist() if prompt else [],  # [P]
        "response_ids": payload.ids.tolist(),  # [L]
        "logprobs": payload.logprobs.tolist(),  # [L] of the policy that sampled the tokens
        "token_spans": payload.spans,  # cover [0, L)
    }
