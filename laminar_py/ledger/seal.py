"""The seal of a finished run: `seal.json` with size and digest of every file of its record.

The controller writes it when a run ends; `laminar audit RUN verify` checks it; the ledger deletes it when the run
continues. A killed or continued run has no seal (law 11). The seal has no key. It finds accidents and casual
edits, down to a bit. A forger can rewrite the ledger, its hash chain and the seal; only a digest of the seal noted
elsewhere reveals that.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
from blake3 import blake3

from laminar_py.ledger.database import (
    LEDGER_NAME,
    SEAL_NAME,
    LedgerError,
    logs_of,
    open_reader,
    open_writer,
    segments_path,
)
from laminar_py.ledger.segments.writer import segments_in
from laminar_py.records.codec import DIGEST_BYTES, file_digest
from laminar_py.records.host import sync, write_file

RECORD = (LEDGER_NAME, "config.yaml", "metrics.jsonl", "fleet.jsonl", "summary.json")


class SealedFile(msgspec.Struct, frozen=True):
    """A file of the record, e.g. `SealedFile(118784, "9f0c...")`."""

    num_bytes: int
    digest: str


class RunSeal(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a finished run, by path in its folder."""

    sealed: float  # seconds since 1970
    seq: int  # of the last event
    head: str  # hash of the last event, in hex
    files: dict[str, SealedFile]
    digest: str = ""  # of all other fields


def seal_run(run: Path) -> RunSeal:
    """Fold SQLite's log into the ledger of a run that has ended, write its seal, and return it.

    Raises `LedgerError` if an open reader blocks the folding.
    """
    ledger = run / LEDGER_NAME
    with closing(open_writer(ledger)) as connection:
        busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        raise LedgerError(f"ledger={ledger}: an open reader blocks it, so the run stays unsealed; end that reader")
    with closing(open_reader(ledger, immutable=True)) as connection:
        seq, head = connection.execute("SELECT seq, hash FROM head").fetchone()
    files = {name: SealedFile((run / name).stat().st_size, file_digest(run / name)) for name in _record(run)}
    open_seal = RunSeal(sealed=time.time(), seq=seq, head=head.hex(), files=files)
    seal = msgspec.structs.replace(open_seal, digest=_digest(open_seal))
    unfinished = run / f"{SEAL_NAME}.tmp"
    write_file(unfinished, _file_bytes(seal))
    unfinished.replace(run / SEAL_NAME)
    sync(run)
    return seal


def read_seal(run: Path) -> RunSeal | None:
    """Return the seal of a run, None without a seal. Raises `LedgerError` if it is damaged or was changed."""
    path = run / SEAL_NAME
    try:
        written = path.read_bytes()
        seal = msgspec.json.decode(written, type=RunSeal)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LedgerError(f"seal={path}: cannot be read ({error}); restore the file") from None
    if seal.digest != _digest(seal) or written != _file_bytes(seal):
        raise LedgerError(f"seal={path}: was changed; restore the file")
    return seal


def seal_digest(run: Path) -> str | None:
    """Return the digest of a run's seal, which the ledger records before it deletes the seal; None without one."""
    path = run / SEAL_NAME
    return file_digest(path) if path.is_file() else None


def differences(run: Path, seal: RunSeal) -> Iterator[tuple[str, str]]:
    """Yield (file, difference) for each file of the record that differs from the seal."""
    found = set(_record(run))
    for name, sealed in sorted(seal.files.items()):
        if name not in found:
            yield name, "is missing"
        elif (size := (run / name).stat().st_size) != sealed.num_bytes:
            yield name, f"was changed: it has {size} bytes, the seal says {sealed.num_bytes}"
        elif file_digest(run / name) != sealed.digest:
            yield name, "was changed: its digest differs from the seal"
    for name in sorted(found - seal.files.keys()):
        yield name, "was added after the run was sealed"
    for log in logs_of(run / LEDGER_NAME):
        yield log.name, "was added after the run was sealed: somebody wrote to the ledger"


def _record(run: Path) -> list[str]:
    """Return the names of the record's files in a run's folder."""
    segments = [str(path.relative_to(run)) for path in segments_in(segments_path(run))]
    return [name for name in RECORD if (run / name).is_file()] + segments


def _file_bytes(seal: RunSeal) -> bytes:
    return msgspec.json.format(msgspec.json.encode(seal)) + b"\n"


def _digest(seal: RunSeal) -> str:
    return blake3(msgspec.json.encode(msgspec.structs.replace(seal, digest=""))).hexdigest(length=DIGEST_BYTES)
