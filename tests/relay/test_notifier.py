"""The publisher's socket, in a process without an event loop."""

import gc
import weakref

import pytest

from laminar_py.relay.wire.messages import Written
from laminar_py.relay.wire.transport import Notifier


@pytest.mark.filterwarnings("error")  # what hangs in the collector ends with one
def test_one_that_nobody_closes_holds_up_no_collection_whatever_waits_in_it():
    notifier = Notifier(None, heartbeat_s=1.0)
    notifier.send(Written(), "tcp://127.0.0.1:9")  # where nobody is
    notifier.of_itself = notifier  # so that the collector finds it
    gone = weakref.ref(notifier)
    del notifier
    gc.collect()
    assert gone() is None
