"""What the audit has to say. Owned by `audit.verify`; shown by the command line."""

from enum import StrEnum

import msgspec


class Law(StrEnum):
    """What a finding speaks against."""

    SEAL = "seal"  # a closed run is as it was sealed
    LOG = "log"  # the event log is whole and unchanged
    ORDER = "order"  # every event was possible when it happened
    ROWS = "rows"  # the tables say what the events say
    ACCOUNTING = "accounting"  # issued = consumed + dropped + live
    CONSUMPTION = "consumption"  # no trajectory is consumed twice, and each by a step that counts it
    SPANS = "spans"  # every response token is stored, unchanged, and knows its version
    ARCHIVE = "archive"  # its files are those that were written
    RECORDING = "recording"  # masks and experts, where recorded, are whole and fit the tokens
    DRAIN = "drain"  # one version per trajectory where that is promised
    STALENESS = "staleness"  # as recorded, and within the bound
    VERSIONS = "versions"  # numbers are not reused and an engine's do not go back
    WEIGHTS = "weights"  # what was loaded is what was published
    DROPS = "drops"  # every drop has a reason


class Finding(msgspec.Struct, frozen=True):
    """One breach, e.g. `Finding(Law.LOG, "event 17", "was changed")`."""

    law: Law
    subject: str
    message: str

    def __str__(self) -> str:
        # one line, whatever it quotes of what was damaged
        return " ".join(f"{self.law}: {self.subject}: {self.message}".split())
