"""Checks that find silent failures (law 13). The audit replays the checks of events over a log."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.control.alarms.events import EventChecks as EventChecks
else:
    __getattr__ = public_names(__name__)
