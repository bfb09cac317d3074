"""Agent that measures the time from each of its requests to the first event. The launcher of agents loads it.

It sends the whole conversation each time, as clients of the API do.
"""

import json
import os
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def run(problem: dict[str, Any]) -> None:
    """Send one request for each text of `texts`; write the seconds to first events to the file `out`."""
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    assert url.hostname is not None, "the launcher gives a whole URL"
    connection = HTTPConnection(url.hostname, url.port)
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    messages: list[dict[str, str]] = []
    first_s = []
    for text in problem["fields"]["texts"]:
        messages.append({"role": "user", "content": text})
        body = json.dumps({"model": "policy", "messages": messages, "stream": True})
        began = time.monotonic()
        connection.request("POST", f"{url.path}/chat/completions", body, headers)
        response = connection.getresponse()
        first = response.readline()
        first_s.append(time.monotonic() - began)
        assert response.status == 200, response.read()
        events = [line[6:] for line in [first, *response.read().splitlines()] if line.startswith(b"data: {")]
        answer = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events]
        messages.append({"role": "assistant", "content": "".join(answer)})
    Path(problem["fields"]["out"]).write_text(json.dumps(first_s))
