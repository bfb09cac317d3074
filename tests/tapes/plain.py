"""Plain records between the script of a fleet and the production classes, and the tape that both write on."""

import json
from dataclasses import dataclass, field
from random import Random


@dataclass(frozen=True, slots=True)
class Given:
    """Assignment; `prefix` counts the tokens that came along and `prefix_sum` tells them from others."""

    id: str
    epoch: int
    group: str
    kind: str
    prompt: int
    prefix: int
    prefix_sum: int
    seed: int
    cap: int
    greedy: bool
    pin: int | None
    used_s: float
    routed: int

    @property
    def trains(self) -> bool:
        """Say that no evaluation is meant."""
        return self.kind == "train"

    @property
    def line(self) -> list:
        """Values that were decided, short."""
        return [
            self.id,
            self.epoch,
            self.pin,
            self.prefix,
            self.prefix_sum % 9973,
            self.seed % 9973,
            self.routed,
            number(self.used_s),
            int(self.greedy),
        ]


@dataclass(frozen=True, slots=True)
class Said:
    """Progress of one trajectory; its tokens follow from `seed` and their places."""

    id: str
    epoch: int
    start: int
    count: int
    seed: int
    spans: tuple[tuple[int, int, int, int | None], ...]
    end: str | None = None
    wall_cut: bool = False
    queue_s: float = 0.0
    generate_s: float = 0.0
    broken: str | None = None
    refusal: str = ""
    experts: tuple[int, int] | None = None
    masked: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """Report of a replica; `loads` are (version, seconds, checksum)."""

    replica: int
    version: int
    admissible: int
    received: int
    said: tuple[Said, ...] = ()
    loads: tuple[tuple[int, float, str | None], ...] = ()
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Look:
    """Survey of a replica; what runs and what waits are (id, context, length)."""

    replica: int
    version: int
    slots: int
    kv_used: int
    kv_capacity: int
    running: tuple[tuple[str, int, int], ...]
    waiting: tuple[tuple[str, int, int], ...] = ()
    settled: bool = True


@dataclass(slots=True)
class Verdict:
    """Score that is on its way."""

    due: float
    id: str
    length: int
    value: float | None
    failure: str | None = None
    by_token: bool = False


@dataclass(slots=True)
class Tape:
    """Lines of JSON, one for each decision, in order."""

    lines: list[str] = field(default_factory=list)
    _later: list[list] = field(default_factory=list)

    def write(self, *values: object) -> None:
        """Put down a line."""
        self.lines.append(json.dumps(values, separators=(",", ":"), default=_plain))

    def later(self, *values: object) -> None:
        """Put down at the next `settle`: the place within the tick is nobody's decision."""
        self._later.append(list(values))

    def settle(self) -> None:
        """Put down what was kept, in an order of its own."""
        for values in sorted(self._later, key=lambda values: json.dumps(values, default=_plain)):
            self.write(*values)
        self._later = []


def number(value: float | None) -> float | None:
    """Round to twelve digits: the last bits may differ between processors."""
    return None if value is None else float(f"{value:.12g}")


def luck(*names: object) -> Random:
    """Random numbers that depend on these names alone."""
    return Random("/".join(map(str, names)))


def _plain(value: object) -> object:
    raise TypeError(f"{value!r} is a {type(value).__name__}: no plain value for a tape")
