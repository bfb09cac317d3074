"""A small HTTP server that scores tokens as SGLang does, for tests without SGLang.

It answers `/model_info`, `/server_info`, `/tokenize` and `/generate` without new tokens, in SGLang's format.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import numpy as np

Score = Callable[[list[int]], list[float | None]]
"""Returns the log-probability of each token but the first, behind the tokens before it."""


def falling(ids: list[int]) -> list[float | None]:
    """A probability that follows from a token, the one before it, and its place."""
    return [-(id + 7 * before + place) / 100 for place, (before, id) in enumerate(pairwise(ids))]


class ScoringServer(ThreadingHTTPServer):
    """Has a model named `model_path` with so many tokens; `failing` answers are left that it refuses with 503."""

    daemon_threads = True

    def __init__(self, score: Score = falling, *, vocab: int = 61, longest: int | None = 4096) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.score, self.vocab, self.longest = score, vocab, longest
        self.model_path, self.version = "/elsewhere/teacher", "default"
        self.failing, self.asked = 0, list[dict[str, object]]()
        self.tokenize: Callable[[str], list[int]] = lambda text: [ord(letter) % 50 for letter in text]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, body: dict[str, object]) -> object:
        """Answer to a request; None if it is refused."""
        match path:
            case "/model_info":
                return {"model_path": self.model_path, "is_generation": True, "weight_version": self.version}
            case "/server_info":
                limit = {} if self.longest is None else {"max_req_input_len": self.longest}
                return {"version": "0.5.23", **limit}
            case "/tokenize":
                ids = self.tokenize(str(body["prompt"]))
                return {"tokens": ids, "count": len(ids), "max_model_len": 4096}
        self.asked.append(body)
        wanted = body.get("token_ids_logprob")
        if wanted:
            return {"text": "", "meta_info": {}} if max(wanted) < self.vocab else None
        return [
            {"text": "", "meta_info": {"id": "a", "input_token_logprobs": self._scored(ids, start)}}
            for ids, start in zip(body["input_ids"], body["logprob_start_len"], strict=True)
        ]

    def _scored(self, ids: list[int], start: int) -> list[tuple[float | None, int, None]]:
        logprobs = [None, *self.score(ids)[start:]]
        named = [id if id < self.vocab - 1 else 0 for id in ids[start:]]  # as SGLang clips the last id
        return [(logprob, id, None) for logprob, id in zip(logprobs, named, strict=True)]


class _Handler(BaseHTTPRequestHandler):
    server: ScoringServer

    def do_GET(self) -> None:
        self._send({})

    def do_POST(self) -> None:
        self._send(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _send(self, body: dict[str, object]) -> None:
        if self.server.failing:
            self.server.failing -= 1
            self.send_error(503)
            return
        answer = self.server.answer(self.path, body)
        if answer is None:
            self.send_error(400, "valid range")
            return
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *given: object) -> None:
        """Nothing."""


@contextmanager
def scoring_server(score: Score = falling, **options: int) -> Iterator[ScoringServer]:
    """A running server, which ends with the block."""
    with ScoringServer(score, **options) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def response_of(ids: np.ndarray, length: int) -> np.ndarray:
    """[length] what `falling` gives the last tokens."""
    return np.array(falling(ids.tolist())[-length:], np.float32)
