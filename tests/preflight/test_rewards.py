"""Servers of rewards are looked at before a run: any answer will do, and silence is one line."""

import json
import socket
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from laminar_py.config.reward import RewardConfig
from laminar_py.config.section import ConfigError
from laminar_py.preflight import rewards
from laminar_py.preflight.rewards import check_answers


def judged_at(port):
    judge = {"kind": "judge", "urls": [f"http://127.0.0.1:{port}/v1"], "model": "m"}
    return RewardConfig.model_validate_json(json.dumps({"use": [judge]}))


@pytest.mark.parametrize("status", [200, 401, 404, 500])
def test_whatever_a_server_answers_it_is_there(status):
    class Answering(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        answer = Thread(target=server.handle_request)
        answer.start()
        check_answers(judged_at(server.server_port))
        answer.join()


def test_a_server_that_says_nothing_in_time_is_named(monkeypatch):
    monkeypatch.setattr(rewards, "ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"urls=http://127.0.0.1:{port}/v1 of judge: does not answer \(timed"
        ):
            check_answers(judged_at(port))
