"""A scoring process as a scorer: what is sent to it."""

from types import SimpleNamespace

import pytest

from laminar_py.records.codec import decode
from laminar_py.records.scoring import Unscored
from laminar_py.runtime.workers.scorers import MESSAGE_BYTES, RemoteScorer
from tests.reward.requests import make_requests
from tests.workers.fakes import Hosts


class Recorder:
    """A part that keeps what it is sent."""

    def __init__(self) -> None:
        self.sent = []
        self.place = SimpleNamespace(node=None)

    async def call(self, name: str, message: bytes) -> None:
        assert name == "submit"
        self.sent.append(message)


@pytest.mark.parametrize(
    ("sizes", "messages"),
    [
        ([1] * 512, [512]),
        ([MESSAGE_BYTES, 1, 1], [1, 2]),
        ([1, MESSAGE_BYTES, MESSAGE_BYTES, 1], [2, 1, 1]),
        ([MESSAGE_BYTES // 2] * 4, [2, 2]),
        ([], []),
    ],
)
async def test_large_responses_go_in_messages_of_a_few(sizes, messages):
    part = Recorder()
    requests = make_requests(*("x" * size for size in sizes))
    await RemoteScorer(part, 1, Hosts()).submit_responses([Unscored(request=request) for request in requests])
    sent = [decode(list[Unscored], message) for message in part.sent]
    assert [len(some) for some in sent] == messages
    assert [one.request.response for some in sent for one in some] == [one.response for one in requests]
