"""Violations that the audit finds, and the rules that they break. Made by the checks, shown by `cli.audit`."""

from enum import StrEnum

import msgspec


class Rule(StrEnum):
    """A rule of the record, and the number of the law in docs/laws.md that is broken with it."""

    law: int

    def __new__(cls, name: str, law: int) -> "Rule":
        rule = str.__new__(cls, name)
        rule._value_, rule.law = name, law
        return rule

    SEAL = "seal", 11  # a closed run is as it was sealed
    LOG = "log", 11  # the event log is whole and unchanged
    ORDER = "order", 11  # every event was possible when it happened
    ROWS = "rows", 11  # the tables say what the events say
    ACCOUNTING = "accounting", 1  # issued = consumed + dropped + live
    CONSUMPTION = "consumption", 1  # no trajectory is consumed twice, and each by a step that counts it
    SPANS = "spans", 2  # every response token is stored, unchanged, and knows its version
    TRUTH = "truth", 9  # what an environment wrote stands as such, and nothing else is trained on than samples
    ARCHIVE = "archive", 11  # its files are those that were written
    RECORDING = "recording", 4  # masks and experts, where recorded, are whole and fit the tokens
    DRAIN = "drain", 2  # one version per trajectory where that is promised
    STALENESS = "staleness", 12  # as recorded, and within the bound
    VERSIONS = "versions", 2  # numbers are not reused and an engine's do not go back
    WEIGHTS = "weights", 3  # loaded bytes are those that were published
    DROPS = "drops", 6  # every drop has a reason


class Violation(msgspec.Struct, frozen=True):
    """A breach of one rule, e.g. `Violation(Rule.LOG, "event 17", "was changed")`."""

    rule: Rule
    subject: str
    message: str

    @property
    def law(self) -> int:
        """Number of the law that it proves broken."""
        return self.rule.law

    def __str__(self) -> str:
        # one line, whatever it quotes of what was damaged
        return " ".join(f"law {self.law}: {self.rule}: {self.subject}: {self.message}".split())
