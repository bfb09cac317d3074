"""The record of a run: write it, seal it, read it back."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.ledger.archive import ArchiveAnswer as ArchiveAnswer
    from laminar_py.ledger.archive import ArchiveRequest as ArchiveRequest
    from laminar_py.ledger.archive import archive_pieces as archive_pieces
    from laminar_py.ledger.archive import file_name as file_name
    from laminar_py.ledger.database import LEDGER_NAME as LEDGER_NAME
    from laminar_py.ledger.database import SCHEMA_VERSION as SCHEMA_VERSION
    from laminar_py.ledger.database import SEGMENTS_NAME as SEGMENTS_NAME
    from laminar_py.ledger.database import reading as reading
    from laminar_py.ledger.ledger import Ledger as Ledger
    from laminar_py.ledger.row_files import read_rows as read_rows
    from laminar_py.ledger.rows import decode_event as decode_event
    from laminar_py.ledger.seal import seal_run as seal_run
    from laminar_py.ledger.trajectory import LiveTrajectory as LiveTrajectory
    from laminar_py.ledger.trajectory import issued as issued
else:
    __getattr__ = public_names(__name__)
