"""Proof from the record alone."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.ledger.audit.queries import Filters as Filters
    from laminar_py.ledger.audit.queries import accounting as accounting
    from laminar_py.ledger.audit.stories import describe_events as describe_events
    from laminar_py.ledger.audit.stories import read_story as read_story
else:
    __getattr__ = public_names(__name__)
