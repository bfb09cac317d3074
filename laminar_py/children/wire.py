"""Calls between our processes and hosted processes (`hosted`), which run code that we do not trust.

A call is four bytes of length, four bytes of the call's number, then a body in the form that both sides agreed on.
File descriptors may travel with it. The owner may send many calls at a time; each gets one answer with its number.
An empty body cancels the call. A hosted process ends when its socket closes. This module imports only the standard
library.
"""

import socket
import struct
import sys

MOST_DESCRIPTORS = 8
CALL = struct.Struct("<II")  # length of a body, number of its call


def own_control() -> socket.socket:
    """Open the socket to the owner, whose descriptor is the last argument. Children do not inherit it."""
    control = socket.socket(fileno=int(sys.argv[-1]))
    control.set_inheritable(False)
    return control


def call_frame(number: int, body: bytes) -> bytes:
    """Encode a call, or its answer, as a frame."""
    return CALL.pack(len(body), number) + body


def receive_call(control: socket.socket) -> tuple[int, bytes, list[int]] | None:
    """Receive number, body and descriptors of the next call; None when the owner has closed the socket."""
    head, descriptors, _, _ = socket.recv_fds(control, CALL.size, MOST_DESCRIPTORS)
    rest = exactly(control, CALL.size - len(head)) if head else None
    if rest is None:
        return None
    size, number = CALL.unpack(head + rest)
    body = exactly(control, size)
    return None if body is None else (number, body, descriptors)


def exactly(source: socket.socket, number: int) -> bytes | None:
    """Receive exactly `number` bytes; None if the other side closes the socket first."""
    text = b""
    while len(text) < number:
        more = source.recv(number - len(text))
        if not more:
            return None
        text += more
    return text
