"""Agent that hands its key to whoever speaks for it, and ends with that. Loaded by the launcher of agents.

What the interpreters of many agents cost on a small machine is theirs and not the endpoint's: one process sends
the requests of all of them (`client`).
"""

import json
import os
import socket
from typing import Any


def run(problem: dict[str, Any]) -> None:
    """Tell a socket, which the problem's `fields` name, who may ask what; return when it is closed."""
    told = {
        "name": problem["trajectory_id"],
        "url": os.environ["OPENAI_BASE_URL"],
        "key": os.environ["OPENAI_API_KEY"],
    }
    with socket.socket(socket.AF_UNIX) as there:
        there.connect(problem["fields"]["socket"])
        there.sendall(json.dumps(told).encode() + b"\n")
        there.recv(1)
