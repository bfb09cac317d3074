"""Files with pieces of responses."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.ledger.segments.frames import AnyPiece as AnyPiece
    from laminar_py.ledger.segments.payload import Payload as Payload
    from laminar_py.ledger.segments.payload import join as join
    from laminar_py.ledger.segments.reader import PayloadReader as PayloadReader
    from laminar_py.ledger.segments.salvage import RecordedProgress as RecordedProgress
    from laminar_py.ledger.segments.salvage import Salvaged as Salvaged
    from laminar_py.ledger.segments.salvage import continuations as continuations
    from laminar_py.ledger.segments.salvage import salvaged as salvaged
    from laminar_py.ledger.segments.writer import SegmentWriter as SegmentWriter
    from laminar_py.ledger.segments.writer import tokens_ref as tokens_ref
else:
    __getattr__ = public_names(__name__)
