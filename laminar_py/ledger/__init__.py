"""The record of a run: write it, seal it, read it back.

A satellite reads the record of a run with these names: `reading` opens the ledger read-only, at one state;
`trajectory_rows`, `read_events`, `read_prompt` and `read_evaluations` read typed rows and events from the
connection; `piece_rows` names pieces of tokens, and `segments.PayloadReader` reads them; `read_rows` reads
`metrics.jsonl` and `fleet.jsonl`. `Machine.apply` replays events, and the audit compares the outcome with the
tables. A bad file raises `LedgerError`, which is a
`ConfigError` of one line.
"""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.ledger.database import LEDGER_NAME as LEDGER_NAME
    from laminar_py.ledger.database import SCHEMA_VERSION as SCHEMA_VERSION
    from laminar_py.ledger.database import SEGMENTS_NAME as SEGMENTS_NAME
    from laminar_py.ledger.database import LedgerError as LedgerError
    from laminar_py.ledger.database import create_tables as create_tables
    from laminar_py.ledger.database import ledger_path as ledger_path
    from laminar_py.ledger.database import reading as reading
    from laminar_py.ledger.database import segments_path as segments_path
    from laminar_py.ledger.evaluations import UNSCORED as UNSCORED
    from laminar_py.ledger.evaluations import answer_of as answer_of
    from laminar_py.ledger.evaluations import in_order as in_order
    from laminar_py.ledger.evaluations import read_evaluations as read_evaluations
    from laminar_py.ledger.ledger import Ledger as Ledger
    from laminar_py.ledger.machine import IllegalEventError as IllegalEventError
    from laminar_py.ledger.machine import Machine as Machine
    from laminar_py.ledger.pieces import NO_COLUMN as NO_COLUMN
    from laminar_py.ledger.pieces import PieceRow as PieceRow
    from laminar_py.ledger.pieces import piece_rows as piece_rows
    from laminar_py.ledger.pieces import spans_of as spans_of
    from laminar_py.ledger.recovery import first_events as first_events
    from laminar_py.ledger.recovery import is_simulated as is_simulated
    from laminar_py.ledger.requests import last_settings as last_settings
    from laminar_py.ledger.requests import settings_on_record as settings_on_record
    from laminar_py.ledger.requests import write_wanted as write_wanted
    from laminar_py.ledger.row_files import append_row as append_row
    from laminar_py.ledger.row_files import open_rows as open_rows
    from laminar_py.ledger.row_files import read_last as read_last
    from laminar_py.ledger.row_files import read_rows as read_rows
    from laminar_py.ledger.row_files import read_tail as read_tail
    from laminar_py.ledger.rows import EVENT_KINDS as EVENT_KINDS
    from laminar_py.ledger.rows import TRAJECTORY_COLUMNS as TRAJECTORY_COLUMNS
    from laminar_py.ledger.rows import Accounting as Accounting
    from laminar_py.ledger.rows import FinishedTurns as FinishedTurns
    from laminar_py.ledger.rows import TrajectoryRow as TrajectoryRow
    from laminar_py.ledger.rows import decode_event as decode_event
    from laminar_py.ledger.rows import decode_events as decode_events
    from laminar_py.ledger.rows import read_accounting as read_accounting
    from laminar_py.ledger.rows import read_events as read_events
    from laminar_py.ledger.rows import read_prompt as read_prompt
    from laminar_py.ledger.rows import read_turns as read_turns
    from laminar_py.ledger.rows import row_values as row_values
    from laminar_py.ledger.rows import trajectory_rows as trajectory_rows
    from laminar_py.ledger.rows import unchecked_rows as unchecked_rows
    from laminar_py.ledger.run_folder import RunFolder as RunFolder
    from laminar_py.ledger.run_folder import new_run as new_run
    from laminar_py.ledger.run_folder import newest_run as newest_run
    from laminar_py.ledger.run_folder import run_at as run_at
    from laminar_py.ledger.run_folder import run_of as run_of
    from laminar_py.ledger.run_folder import runs_of as runs_of
    from laminar_py.ledger.seal import differences as differences
    from laminar_py.ledger.seal import read_seal as read_seal
    from laminar_py.ledger.seal import seal_digest as seal_digest
    from laminar_py.ledger.seal import seal_run as seal_run
    from laminar_py.ledger.trajectory import LiveTrajectory as LiveTrajectory
    from laminar_py.ledger.trajectory import issued as issued
    from laminar_py.ledger.trajectory import live_rows as live_rows
    from laminar_py.ledger.writer import SIDE_TABLES as SIDE_TABLES
    from laminar_py.ledger.writer import Stamped as Stamped
    from laminar_py.ledger.writer import apply_to_tables as apply_to_tables
else:
    __getattr__ = public_names(__name__)
