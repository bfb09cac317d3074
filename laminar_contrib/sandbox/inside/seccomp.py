"""Seccomp: a filter of the system calls that a program may make, assembled here.

The filter refuses calls that reach out of the sandbox, new processes, and rarely used parts of the kernel. It
refuses calls that reserve space or flush all disks, and files without a name, which the size of the folder does
not count. A refused socket answers "network is down" and a refused process "try again", so labels can tell them
from other refusals. The filter also refuses what Landlock does not know of: changes of times, modes, owners and
extended attributes, leases, the access mode 3 of `open` and, before its version 3, truncation. Calls that set
times and modes have no effect but report success, since `shutil.copy` and others do not expect a refusal.
"""

import ctypes
import errno
import struct

from laminar_py.children import kernel

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NEW_CALLS = 451  # first number that is not known here; both machines share those from 424 on
SHARED = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "openat2": 437, "pidfd_getfd": 438, "process_madvise": 440,
    "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447, "process_mrelease": 448,
    "set_mempolicy_home_node": 450,
}  # fmt: skip
BY_MACHINE = {
    "x86_64": {
        "open": 2, "truncate": 76,
        "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "utime": 132, "setxattr": 188,
        "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199,
        "timer_create": 222, "utimes": 235, "fchownat": 260, "futimesat": 261, "fchmodat": 268,
        "utimensat": 280, "openat": 257,
        "ioctl": 16, "shmget": 29, "shmat": 30, "shmctl": 31, "socket": 41, "connect": 42, "accept": 43,
        "bind": 49, "listen": 50, "socketpair": 53, "clone": 56, "fork": 57, "vfork": 58, "kill": 62,
        "semget": 64, "semop": 65, "semctl": 66, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71,
        "fcntl": 72, "ptrace": 101, "syslog": 103, "rt_sigqueueinfo": 129, "uselib": 134, "personality": 135,
        "ustat": 136, "sysfs": 139, "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144,
        "modify_ldt": 154, "pivot_root": 155, "_sysctl": 156, "prctl": 157, "adjtimex": 159, "chroot": 161,
        "sync": 162, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168,
        "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173,
        "create_module": 174, "init_module": 175, "delete_module": 176, "quotactl": 179, "nfsservctl": 180,
        "tkill": 200, "sched_setaffinity": 203, "io_setup": 206, "lookup_dcookie": 212, "semtimedop": 220,
        "clock_settime": 227, "tgkill": 234, "mbind": 237, "set_mempolicy": 238, "mq_open": 240,
        "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "ioprio_set": 251,
        "migrate_pages": 256, "unshare": 272, "vmsplice": 278, "move_pages": 279, "fallocate": 285,
        "accept4": 288, "rt_tgsigqueueinfo": 297, "perf_event_open": 298, "fanotify_init": 300, "prlimit64": 302,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "syncfs": 306,
        "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
        "sched_setattr": 314, "seccomp": 317, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321,
        "userfaultfd": 323,
    },
    "aarch64": {
        "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15,
        "fremovexattr": 16, "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55, "utimensat": 88,
        "timer_create": 107, "truncate": 45, "openat": 56, "io_setup": 0, "lookup_dcookie": 18, "fcntl": 25,
        "ioctl": 29, "ioprio_set": 30, "umount2": 39, "mount": 40, "pivot_root": 41, "nfsservctl": 42,
        "fallocate": 47, "chroot": 51, "quotactl": 60, "vmsplice": 75, "sync": 81, "acct": 89,
        "personality": 92, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106,
        "clock_settime": 112, "syslog": 116, "ptrace": 117, "sched_setparam": 118, "sched_setscheduler": 119,
        "sched_setaffinity": 122, "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138,
        "setpriority": 140, "reboot": 142, "sethostname": 161, "setdomainname": 162, "prctl": 167,
        "settimeofday": 170, "adjtimex": 171, "mq_open": 180, "msgget": 186, "msgctl": 187, "msgrcv": 188,
        "msgsnd": 189, "semget": 190, "semctl": 191, "semtimedop": 192, "semop": 193, "shmget": 194,
        "shmctl": 195, "shmat": 196, "socket": 198, "socketpair": 199, "bind": 200, "listen": 201,
        "accept": 202, "connect": 203, "add_key": 217, "request_key": 218, "keyctl": 219, "clone": 220,
        "swapon": 224, "swapoff": 225, "mbind": 235, "set_mempolicy": 237, "migrate_pages": 238,
        "move_pages": 239, "rt_tgsigqueueinfo": 240, "perf_event_open": 241, "accept4": 242, "prlimit64": 261,
        "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265, "clock_adjtime": 266,
        "syncfs": 267, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
        "finit_module": 273, "sched_setattr": 274, "seccomp": 277, "memfd_create": 279, "bpf": 280,
        "userfaultfd": 282, "kexec_file_load": 294,
    },
}  # fmt: skip
NETWORK = ("socket", "connect", "accept", "accept4", "bind", "listen")
SIGNALS = ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
TIMES = ("utime", "utimes", "futimesat", "utimensat")
MODES = ("chmod", "fchmod", "fchmodat")
OPENS = {"open": 1, "openat": 2}  # argument that has the flags
NAMESPACES = 0x7E020080  # flags of clone that make one
THREAD = 0x00010000
# Commands of fcntl that send signals to others, or make them wait: F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE.
FILE_OWNERS = (8, 10, 15, 1024)
SETTINGS = (15, 16, 0x53564D41)  # of prctl that programs need: PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
TERMINAL = (0x5412, 0x541C, 0x8901, 0x8902)  # of ioctl: TIOCSTI, TIOCLINUX, FIOSETOWN, SIOCSPGRP
FLAGS = (0x40086602, 0x401C5820, 0x40087602)  # of ioctl: FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR, FS_IOC_SETVERSION
UNIX, STREAM = 1, 1
UNNAMED, TRUNCATES, ACCESS = 0x400000, 0x200, 3  # flags of open: O_TMPFILE, O_TRUNC, O_ACCMODE
RIGHTLESS = (3, 3 | TRUNCATES, TRUNCATES)  # these change a file without a right to write; 3 needs no right at all
OWN_PROCESS = 0x0A5E1F00  # stands for the process id in a filter, until `for_process`

LOAD, EQUAL, AT_LEAST, ANY_BIT, MASK, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # places in the data that a filter sees


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def offered() -> bool:
    """Return True if this module knows the system calls of this machine."""
    return kernel.MACHINE in ARCHITECTURES


def assemble() -> bytes:
    """Assemble the filter, with `OWN_PROCESS` for the id of the program, which may signal itself alone."""
    calls = SHARED | BY_MACHINE[kernel.MACHINE]
    answers = dict.fromkeys(calls, errno.EPERM) | dict.fromkeys(NETWORK, errno.ENETDOWN)
    answers |= dict.fromkeys((*TIMES, *MODES), 0) | dict.fromkeys(("fork", "vfork"), errno.EAGAIN)
    answers["openat2"] = errno.ENOSYS  # its flags lie in memory: callers fall back to openat
    answers["fallocate"] = errno.EOPNOTSUPP  # callers write zeros instead
    bodies = {name: [_refuse(number)] for name, number in answers.items()} | _conditional()
    code = [
        _op(LOAD, ARCHITECTURE),
        _op(EQUAL, ARCHITECTURES[kernel.MACHINE], 1, 0),
        _op(RETURN, KILL),
        _op(LOAD, NUMBER),
        *_case(435, [_refuse(errno.ENOSYS)]),  # clone3, whose flags lie in memory: callers fall back to clone
        _op(AT_LEAST, NEW_CALLS, 0, 1),
        _refuse(errno.ENOSYS),
    ]
    for name, body in bodies.items():
        code += _case(calls[name], body) if name in calls else []
    return b"".join([*code, _op(RETURN, ALLOW)])


def for_process(code: bytes, process: int) -> bytes:
    """Return the filter for the process of this id."""
    return code.replace(struct.pack("=I", OWN_PROCESS), struct.pack("=I", process))


def apply_filter(code: bytes) -> None:
    """Apply the filter to this process and its future children. `no_new_privs` must be set."""
    memory = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(memory, ctypes.c_void_p))
    kernel.prctl(kernel.PR_SET_SECCOMP, 2, ctypes.byref(program))


def _conditional() -> dict[str, list[bytes]]:
    """Return the filter programs of calls that are allowed with some arguments only, by name of the call."""
    return {
        "clone": [
            *_argument(0),
            _op(ANY_BIT, NAMESPACES, 0, 1),
            _refuse(errno.EPERM),
            _op(ANY_BIT, THREAD, 1, 0),
            _refuse(errno.EAGAIN),
            _op(RETURN, ALLOW),
        ],
        "fcntl": _refuse_values(1, FILE_OWNERS),
        "ioctl": _refuse_values(1, (*TERMINAL, *FLAGS)),
        "prctl": _only(0, *SETTINGS),
        "prlimit64": _only(0, 0),
        "socketpair": [
            *_argument(0),
            _op(EQUAL, UNIX, 1, 0),
            _refuse(errno.ENETDOWN),
            *_argument(1),
            _op(MASK, 0xF),
            _op(EQUAL, STREAM, 1, 0),  # datagrams could be sent elsewhere
            _refuse(errno.ENETDOWN),
            _op(RETURN, ALLOW),
        ],
        **{
            name: [
                *_argument(index),
                _op(ANY_BIT, UNNAMED, 0, 1),
                _refuse(errno.EOPNOTSUPP),  # callers create a file with a name instead
                *_refuse_values(index, RIGHTLESS, mask=ACCESS | TRUNCATES),
            ]
            for name, index in OPENS.items()
        },
        **{name: _only(0, OWN_PROCESS) for name in SIGNALS},
    }


def _case(number: int, body: list[bytes]) -> list[bytes]:
    """Return the filter code for one system call. Every path of `body` ends with a verdict."""
    return [_op(EQUAL, number, 0, len(body)), *body]


def _argument(index: int) -> list[bytes]:
    return [_op(LOAD, ARGUMENTS + 8 * index)]  # the low half: the arguments that we check have 32 bits


def _only(index: int, *values: int) -> list[bytes]:
    tests = [part for value in values for part in (_op(EQUAL, value, 0, 1), _op(RETURN, ALLOW))]
    return [*_argument(index), *tests, _refuse(errno.EPERM)]


def _refuse_values(index: int, values: tuple[int, ...], *, mask: int = 0xFFFFFFFF) -> list[bytes]:
    tests = [part for value in values for part in (_op(EQUAL, value, 0, 1), _refuse(errno.EPERM))]
    return [*_argument(index), _op(MASK, mask), *tests, _op(RETURN, ALLOW)]


def _refuse(number: int) -> bytes:
    return _op(RETURN, REFUSE | number)


def _op(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, otherwise, value)
