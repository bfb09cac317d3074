"""File in which agents of the kill test write down the answers that they get."""

from pathlib import Path
from typing import Any

LOG = Path(__file__).parent / "out" / "agents.log"


def note(problem: dict[str, Any], what: str, value: str) -> None:
    """Append a line: trajectory, number of a turn or `error`, and the answer or the error."""
    with LOG.open("a") as file:
        file.write(f"{problem['trajectory_id']}\t{what}\t{value}\n")
