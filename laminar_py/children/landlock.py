"""Landlock: a process restricts for itself which files it may open, below the rights of its user.

Two callers: a sandbox of `laminar_contrib` (`ruleset`), and processes of user code that must not write into the
record or the weights of a run (`forbid_writes`).

Source: https://docs.kernel.org/userspace-api/landlock.html
"""

import ctypes
import os
import stat
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from pathlib import Path

from laminar_py.children import kernel

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_DIR, MAKE_REG, MAKE_FIFO, MAKE_SYM, REFER, TRUNCATE = (1 << bit for bit in (7, 8, 10, 12, 13, 14))
ALL_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # known from this version on
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
READ = READ_FILE | READ_DIR
USE = WRITE_FILE | READ_FILE | TRUNCATE
OWN = USE | READ_DIR | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_FIFO | MAKE_SYM | REFER
WRITES = OWN & ~(READ_FILE | READ_DIR)
BIND_TCP, CONNECT_TCP = 1, 2  # from version 4 on
ABSTRACT_SOCKETS, SIGNALS = 1, 2  # from version 6 on
KERNEL = (Path("/proc"), Path("/sys"))  # files there change settings of the whole machine
KEPT_CAPABILITIES = 0b10  # of root: CAP_DAC_OVERRIDE, to read and write files of other users


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """Return the version of Landlock in this kernel; 0 without Landlock."""
    try:
        return kernel.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except OSError:
        return 0


def ruleset(rules: Sequence[tuple[str, int]]) -> int:
    """Make rules that allow these rights below these paths and refuse all others; return their descriptor.

    They also refuse TCP, abstract sockets and signals to other processes, if the kernel's version can.
    """
    known = version()
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    return _make_rules(rules, _Ruleset(_known_rights(), BIND_TCP | CONNECT_TCP, ABSTRACT_SOCKETS | SIGNALS), size)


def _writes_ruleset(rules: Sequence[tuple[str, int]]) -> int:
    """Make rules that refuse to write except below these paths, and allow all else; return their descriptor."""
    return _make_rules(rules, _Ruleset(_known_rights() & WRITES, 0, 0), 8)


def _known_rights() -> int:
    known = version()
    return ALL_RIGHTS[max(number for number in ALL_RIGHTS if number <= known)]


def _make_rules(rules: Sequence[tuple[str, int]], wanted: _Ruleset, size: int) -> int:
    """Make a ruleset that refuses the accesses `wanted`, except `rules` of (path, allowed rights).

    Returns its descriptor. The kernel reads `size` bytes of `wanted`. Skips paths that do not exist.
    """
    fence = kernel.syscall(CREATE_RULESET, ctypes.byref(wanted), ctypes.c_size_t(size), ctypes.c_uint32(0))
    for path, rights in rules:
        try:
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            _add_rule(fence, parent, rights & wanted.files)
        finally:
            os.close(parent)
    return fence


def _add_rule(fence: int, parent: int, rights: int) -> None:
    """Allow `rights` below the open path `parent`, or only the rights of files if it is no folder."""
    if not stat.S_ISDIR(os.fstat(parent).st_mode):
        rights &= OF_FILES
    rule = _PathRule(rights, parent)
    kernel.syscall(ADD_RULE, ctypes.c_int(fence), ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint32(0))


def restrict(fence: int) -> None:
    """Apply rules to this process and its future children. `no_new_privs` must be set."""
    kernel.syscall(RESTRICT_SELF, ctypes.c_int(fence), ctypes.c_uint32(0))


def forbid_writes(folders: Sequence[Path]) -> bool:
    """Forbid this process and its children to write below `folders`, in /proc and in /sys.

    The processes also cannot create or remove entries in the folders above `folders`. Root loses its
    capabilities, so it cannot read the memory or environment of other processes. Returns False if the kernel has
    no Landlock; then this only drops the capabilities.
    """
    closed = {*KERNEL, *(folder.resolve() for folder in folders)}
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    fenced = bool(version())
    if fenced:
        fence = _writes_ruleset([(str(path), WRITES) for path in _writable_paths(Path("/"), closed)])
        try:
            restrict(fence)
        finally:
            os.close(fence)
    kernel.keep_capabilities(KEPT_CAPABILITIES)
    return fenced


def _writable_paths(folder: Path, closed: Set[Path]) -> Iterator[Path]:
    """Yield the largest folders and files in `folder` that neither are nor contain a path of `closed`.

    A folder that contains one and cannot be listed yields nothing.
    """
    above = {parent for path in closed for parent in path.parents}
    with suppress(PermissionError), os.scandir(folder) as entries:
        for entry in entries:
            path = Path(entry.path)
            if path in closed or entry.is_symlink():
                continue
            if path in above:
                yield from _writable_paths(path, closed)
            else:
                yield path
