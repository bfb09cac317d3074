"""Files in memory by which a program is given its input and leaves its output: nobody has to wait on pipes."""

import fcntl
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from types import TracebackType

import msgspec

from laminar_py.sandbox.inside.program import ProgramPayload
from laminar_py.sandbox.inside.wire import HEADER


class RunFiles:
    """Descriptors of one run, in the order that a zygote takes them; closed at the end of a `with`."""

    def __init__(self, payload: bytes, stdin: bytes) -> None:
        self.descriptors = [_file(payload), _file(stdin), *(_file(b"", appends=True) for _ in range(3))]

    def __enter__(self) -> "RunFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of them."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def left(self, limit: int) -> "Left":
        """Output, errors and report, each up to `limit` bytes."""
        outputs = self.descriptors[2:]
        too_long = any(os.fstat(descriptor).st_size > limit for descriptor in outputs)
        stdout, stderr, report = (os.pread(descriptor, limit, 0) for descriptor in outputs)
        return Left(stdout=stdout, stderr=stderr, report=report, too_long=too_long)

    def report(self, text: bytes) -> None:
        """Put down what came by another way as the report."""
        os.ftruncate(self.descriptors[-1], 0)
        os.write(self.descriptors[-1], text)

    def clear(self) -> None:
        """Empty the outputs for the next call of a session."""
        for descriptor in self.descriptors[2:]:
            os.ftruncate(descriptor, 0)


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a program left, e.g. `Left(stdout=b"3", stderr=b"", report=b"{}", too_long=False)`."""

    stdout: bytes
    stderr: bytes
    report: bytes
    too_long: bool


def pack(payload: ProgramPayload, files: Mapping[str, bytes]) -> bytes:
    """ProgramPayload and files as a child reads them.

    Raises `ValueError` for a name that leads out of the folder, or a text that cannot be encoded.
    """
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise ValueError(f"files={name!r}: name a file below the program's folder, without '..'")
    text = msgspec.json.encode(replace(payload, files={name: len(content) for name, content in files.items()}))
    return b"".join([len(text).to_bytes(HEADER, "big"), text, *files.values()])


def _file(content: bytes, *, appends: bool = False) -> int:
    """Descriptor of a file without a name that holds this."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("run", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    if appends:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return descriptor
