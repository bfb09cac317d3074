"""Programs that try to get out of a sandbox, or to break it, from `hostile.txt`.

Each begins with a line `=== name: labels that it may be given, walls, prints '...'`: `walls` where only a tier
with walls contains it, `prints` where the output is known. In the text CANARY is a file of the host's, PORT that
of a server, and the line CALL defines `call`, a system call by its number on x86_64.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from laminar_contrib.sandbox.records import SandboxLabel
from tests.sandbox.conftest import TIGHT

ATTEMPTS = 3
CALL = "import ctypes; call = ctypes.CDLL(None, use_errno=True).syscall; call.restype = ctypes.c_long"
HEAD = re.compile(r"(?P<name>[\w-]+): (?P<labels>[a-z ]+)(?P<walls>, walls)?(, prints (?P<prints>'.*'))?")


@dataclass(frozen=True, kw_only=True)
class Hostile:
    name: str
    labels: list[str]
    walls: bool
    prints: str | None
    program: str


async def run_hostile(pool, hostile, program):
    """What became of a program; again where a busy machine gave it less of a core than it may have."""
    for _ in range(ATTEMPTS):
        result = await pool.run(program)
        if "time" in hostile.labels or result.label is not SandboxLabel.TIME or result.cpu_s >= TIGHT.cpu_s:
            break
    return result


def read(text):
    for part in re.sub(r"^# .*\n", "", text, flags=re.MULTILINE).split("=== ")[1:]:
        head, _, program = part.partition("\n")
        found = HEAD.fullmatch(head)
        yield Hostile(
            name=found["name"],
            labels=found["labels"].split(),
            walls=bool(found["walls"]),
            prints=None if found["prints"] is None else ast.literal_eval(found["prints"]),
            program=program.replace("CALL\n", f"{CALL}\n"),
        )


HOSTILE = list(read(Path(__file__).with_suffix(".txt").read_text()))
