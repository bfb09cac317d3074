"""Landlock: which files a process may open, whatever its user may. Rules are made once and put on by each child.

Source: https://docs.kernel.org/userspace-api/landlock.html
"""

import ctypes
import os
import stat
from collections.abc import Sequence

from laminar_py.sandbox.inside import kernel

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_DIR, MAKE_REG, MAKE_FIFO, MAKE_SYM, REFER, TRUNCATE = (1 << bit for bit in (7, 8, 10, 12, 13, 14))
ALL_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # known from this version on
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
READ = EXECUTE | READ_FILE | READ_DIR
USE = WRITE_FILE | READ_FILE | TRUNCATE
OWN = USE | READ_DIR | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_FIFO | MAKE_SYM | REFER
WRITES = OWN & ~(READ_FILE | READ_DIR)
BIND_TCP, CONNECT_TCP = 1, 2  # from version 4 on
ABSTRACT_SOCKETS, SIGNALS = 1, 2  # from version 6 on


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """Version of Landlock that the kernel has, 0 where it has none or it is off."""
    try:
        return kernel.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except OSError:
        return 0


def ruleset(rules: Sequence[tuple[str, int]]) -> int:
    """Descriptor of rules that allow these rights beneath these paths and nothing else.

    Signals to others, TCP and abstract sockets are refused where the kernel's version knows them.
    """
    known = version()
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    return _fence(rules, _Ruleset(_known_rights(), BIND_TCP | CONNECT_TCP, ABSTRACT_SOCKETS | SIGNALS), size)


def writes_ruleset(rules: Sequence[tuple[str, int]]) -> int:
    """Descriptor of rules that refuse to write but beneath these paths, and refuse nothing else."""
    return _fence(rules, _Ruleset(_known_rights() & WRITES, 0, 0), 8)


def _known_rights() -> int:
    known = version()
    return ALL_RIGHTS[max(number for number in ALL_RIGHTS if number <= known)]


def _fence(rules: Sequence[tuple[str, int]], wanted: _Ruleset, size: int) -> int:
    fence = kernel.syscall(CREATE_RULESET, ctypes.byref(wanted), ctypes.c_size_t(size), ctypes.c_uint32(0))
    for path, rights in rules:
        try:
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:  # removed meanwhile: nothing is allowed there then
            continue
        try:
            _add_rule(fence, parent, rights & wanted.files)
        finally:
            os.close(parent)
    return fence


def _add_rule(fence: int, parent: int, rights: int) -> None:
    if not stat.S_ISDIR(os.fstat(parent).st_mode):
        rights &= OF_FILES
    rule = _PathRule(rights, parent)
    kernel.syscall(ADD_RULE, ctypes.c_int(fence), ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint32(0))


def restrict(fence: int) -> None:
    """Put the rules on this process and on all that it starts; `no_new_privs` must be set."""
    kernel.syscall(RESTRICT_SELF, ctypes.c_int(fence), ctypes.c_uint32(0))
