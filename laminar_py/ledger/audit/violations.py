"""Violations and the rules that they break. The checks of the audit make them; `cli.audit` prints them."""

from enum import StrEnum

import msgspec


class Rule(StrEnum):
    """A rule of the record, with the number of its law in docs/laws.md."""

    law: int

    def __new__(cls, name: str, law: int) -> "Rule":
        rule = str.__new__(cls, name)
        rule._value_, rule.law = name, law
        return rule

    SEAL = "seal", 11  # a finished run is unchanged since its seal
    LOG = "log", 11  # the event log is whole and unchanged
    ORDER = "order", 11  # every event was possible when it happened
    ROWS = "rows", 11  # the tables agree with the events
    ACCOUNTING = "accounting", 1  # issued = consumed + dropped + live
    CONSUMPTION = "consumption", 1  # no trajectory is consumed twice; each step counts its own
    SPANS = "spans", 2  # every response token is stored unchanged, with its version
    TRUTH = "truth", 9  # environment tokens are marked as such; only sampled tokens are trained on
    ARCHIVE = "archive", 11  # archive files are unchanged
    RECORDING = "recording", 4  # recorded masks and experts are complete and fit the tokens
    DRAIN = "drain", 2  # one version per trajectory, if promised
    STALENESS = "staleness", 12  # as recorded, and within the bound
    VERSIONS = "versions", 2  # numbers are not reused, and an engine's versions do not go back
    WEIGHTS = "weights", 3  # loaded bytes are the published ones
    DROPS = "drops", 6  # every drop has a reason


class Violation(msgspec.Struct, frozen=True):
    """A breach of one rule, e.g. `Violation(Rule.LOG, "event 17", "was changed")`."""

    rule: Rule
    subject: str
    message: str

    @property
    def law(self) -> int:
        """Number of the broken law."""
        return self.rule.law

    def __str__(self) -> str:
        # one line, whatever damaged text it quotes
        return " ".join(f"law {self.law}: {self.rule}: {self.subject}: {self.message}".split())
