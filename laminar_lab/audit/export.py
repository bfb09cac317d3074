"""Export of a run's trajectories for other tools, as JSONL or Parquet. `laminar audit RUN export` calls it.

A row has every column of the table `trajectory`, and with responses also prompt, token ids, log-probabilities and
spans. Memory holds one block of trajectories. The file gets its name when it is complete.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, get_args, get_type_hints

import msgspec

from laminar_py.config.section import ConfigError
from laminar_py.ledger import TRAJECTORY_COLUMNS, StoredResponses, TrajectoryRow, reading, trajectory_rows
from laminar_py.ledger.segments import Payload
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import Prompt

if TYPE_CHECKING:
    import pyarrow as pa

_BLOCK = 4096


class ExportedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that `--responses` adds to a trajectory."""

    prompt_text: str
    answer: str
    task: str
    prompt_ids: list[int]  # [P]
    response_ids: list[int]  # [L]
    logprobs: list[float]  # [L] of the policy that sampled the tokens
    token_spans: tuple[Span, ...]  # cover [0, L)


ExportRow = tuple[TrajectoryRow, ExportedResponse | None]


def export(run: Path, out: Path, *, responses: bool = False) -> int:
    """Write all trajectories to a new file, JSONL or Parquet by its suffix; return their number.

    Rows are in order of issue; with `responses`, archived trajectories come first. Raises `ConfigError`.
    """
    if out.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"out={out}: its suffix is neither .jsonl nor .parquet; use one of them")
    if out.exists():
        raise ConfigError(f"out={out}: exists already; name a new file")
    if not out.parent.is_dir():
        raise ConfigError(f"out={out}: folder {out.parent} does not exist; create it")
    unfinished = out.with_name(f"{out.name}.tmp")
    with reading(run) as connection:
        rows: Iterator[ExportRow] = ((row, None) for row in trajectory_rows(connection))
        if responses:
            stored = StoredResponses(run, connection).all_responses()
            rows = ((row, _response(prompt, payload)) for row, prompt, payload in stored)
        try:
            if out.suffix == ".jsonl":
                count = _write_jsonl(unfinished, rows)
            else:
                count = _write_parquet(unfinished, rows, _schema(responses))
            unfinished.replace(out)
        finally:
            unfinished.unlink(missing_ok=True)
    return count


def _response(prompt: Prompt | None, payload: Payload) -> ExportedResponse:
    """Return the exported columns of a response; columns of a missing prompt are empty."""
    return ExportedResponse(
        prompt_text=prompt.text if prompt else "",
        answer=prompt.answer if prompt else "",
        task=prompt.task if prompt else "",
        prompt_ids=prompt.ids.tolist() if prompt else [],
        response_ids=payload.ids.tolist(),
        logprobs=payload.logprobs.tolist(),
        token_spans=payload.spans,
    )


def _fields(row: TrajectoryRow, response: ExportedResponse | None) -> dict[str, object]:
    """Return the columns of a trajectory and of its response, by name."""
    columns: dict[str, object] = dict(zip(TRAJECTORY_COLUMNS, msgspec.to_builtins(row), strict=True))
    return columns if response is None else {**columns, **msgspec.to_builtins(response)}


def _write_jsonl(path: Path, rows: Iterator[ExportRow]) -> int:
    encoder, count = msgspec.json.Encoder(), 0
    with path.open("wb") as file:
        for row in rows:
            file.write(encoder.encode(_fields(*row)) + b"\n")
            count += 1
    return count


def _write_parquet(path: Path, rows: Iterator[ExportRow], schema: "pa.Schema") -> int:
    """Write rows in blocks to a Parquet file, and return their number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while block := [_fields(*row) for row in islice(rows, _BLOCK)]:
            writer.write_table(pa.Table.from_pylist(block, schema=schema))
            count += len(block)
    return count


def _schema(responses: bool) -> "pa.Schema":
    """Return the Parquet columns of a trajectory, with columns of its response if `responses`."""
    import pyarrow as pa

    numbers = {int: pa.int64(), float: pa.float64()}
    kinds = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(TrajectoryRow).items()}
    fields = [
        (name, next((numbers[k] for k in kinds[name] if k in numbers), pa.string())) for name in TRAJECTORY_COLUMNS
    ]
    if responses:
        fields += [
            *((name, pa.string()) for name in ("prompt_text", "answer", "task")),
            ("prompt_ids", pa.list_(pa.int32())),
            ("response_ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float32())),
            ("token_spans", pa.list_(pa.list_(pa.int32()))),
        ]
    return pa.schema(fields)
