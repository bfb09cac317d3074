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
    from laminar_py.ledger.evaluations import read_evaluations as read_evaluations
    from laminar_py.ledger.ledger import Ledger as Ledger
    from laminar_py.ledger.live import ledger_disk as ledger_disk
    from laminar_py.ledger.live import place_ledger as place_ledger
    from laminar_py.ledger.machine import Machine as Machine
    from laminar_py.ledger.recovery import first_events as first_events
    from laminar_py.ledger.row_files import append_row as append_row
    from laminar_py.ledger.row_files import open_rows as open_rows
    from laminar_py.ledger.row_files import read_last as read_last
    from laminar_py.ledger.row_files import read_rows as read_rows
    from laminar_py.ledger.row_files import read_tail as read_tail
    from laminar_py.ledger.rows import decode_event as decode_event
    from laminar_py.ledger.run_folder import RunFolder as RunFolder
    from laminar_py.ledger.run_folder import new_run as new_run
    from laminar_py.ledger.run_folder import newest_run as newest_run
    from laminar_py.ledger.run_folder import runs_of as runs_of
    from laminar_py.ledger.seal import seal_run as seal_run
    from laminar_py.ledger.trajectory import LiveTrajectory as LiveTrajectory
    from laminar_py.ledger.trajectory import issued as issued
else:
    __getattr__ = public_names(__name__)
