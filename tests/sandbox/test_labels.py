"""Labels come from the kernel and the owner first; what a program says of itself cannot make it look better."""

import signal

import pytest

from laminar_contrib.sandbox.inside.messages import SandboxLimits
from laminar_contrib.sandbox.inside.program import Claim, kind_of
from laminar_contrib.sandbox.records import SandboxLabel, label, read_claim

LIMITS = SandboxLimits()
FAILED = 1 << 8  # exit code 1


@pytest.mark.parametrize(
    ("expected", "evidence"),
    [
        ("ok", {"status": 0}),
        ("ok", {"status": 0, "claim": Claim(kind="memory", detail="forged")}),
        ("ok", {"status": None}),
        ("error", {"status": None, "claim": Claim(detail="KeyError: 1")}),
        ("error", {"status": FAILED}),
        ("error", {"status": FAILED, "claim": Claim(kind="ok", finished=True)}),
        ("network", {"status": FAILED, "claim": Claim(kind="network")}),
        ("time", {"status": signal.SIGXCPU}),
        ("time", {"status": signal.SIGKILL, "ended": "wall"}),
        ("time", {"status": signal.SIGKILL, "cpu_s": 6.0}),
        ("crash", {"status": signal.SIGKILL, "cpu_s": 0.1}),
        ("crash", {"status": signal.SIGSEGV, "claim": Claim(finished=True)}),
        ("crash", {"status": signal.SIGRTMIN + 3}),
        ("files", {"status": signal.SIGXFSZ}),
        ("files", {"status": signal.SIGKILL, "ended": "folder"}),
        ("output", {"status": signal.SIGXFSZ, "too_long": True}),
        ("output", {"status": 0, "too_long": True}),
    ],
)
def test_a_label_follows_from_the_evidence(expected, evidence):
    found, detail = label(LIMITS, **{"claim": Claim(), **evidence})
    assert found is SandboxLabel(expected)
    assert "\n" not in detail


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[" * 100_000, b'{"kind": 1}', b"\xff", b"null", b'{"cpu_s": 1e999}']
)
def test_a_report_that_is_none_claims_nothing(text):
    assert read_claim(text) == Claim()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("memory", MemoryError()),
        ("processes", RuntimeError("can't start new thread")),
        ("processes", BlockingIOError(11, "Resource temporarily unavailable")),
        ("network", OSError(100, "Network is down")),
        ("files", FileNotFoundError(2, "No such file", "/etc/passwd")),
        ("files", OSError(28, "No space left on device")),
        ("", KeyError(1)),
        ("", OSError(9, "Bad file descriptor")),
    ],
)
def test_the_kind_of_an_exception_is_seen_through_those_it_led_to(kind, error):
    outer = ValueError("failed")
    outer.__cause__ = error
    assert kind_of(error) == kind_of(outer) == kind
