"""Agent that hands its key to a socket, and ends when the other side closes it. The launcher of agents loads it.

One process (`conversations`) sends the requests of all agents, so that the interpreters of many agents on a small
machine do not count as the endpoint's cost.
"""

import json
import os
import socket
from typing import Any


def run(problem: dict[str, Any]) -> None:
    """Send name, URL and key to the socket in the problem's `fields`; return when it is closed."""
    permission = {
        "name": problem["trajectory_id"],
        "url": os.environ["OPENAI_BASE_URL"],
        "key": os.environ["OPENAI_API_KEY"],
    }
    with socket.socket(socket.AF_UNIX) as there:
        there.connect(problem["fields"]["socket"])
        there.sendall(json.dumps(permission).encode() + b"\n")
        there.recv(1)
