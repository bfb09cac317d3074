"""Labels come from the kernel and the owner first; what a program says of itself cannot make it look better."""

import signal

import pytest

from laminar_contrib.sandbox.inside.messages import SandboxLimits
from laminar_contrib.sandbox.inside.program import Claim
from laminar_contrib.sandbox.records import SandboxLabel, label, read_claim

LIMITS = SandboxLimits()
FAILED = 1 << 8  # exit code 1


@pytest.mark.parametrize(
    ("expected", "evidence"),
    [
        ("ok", {"status": 0}),
        ("ok", {"status": 0, "claim": Claim(detail="forged")}),
        ("ok", {"status": None}),
        ("error", {"status": None, "claim": Claim(detail="KeyError: 1")}),
        ("error", {"status": FAILED}),
        ("error", {"status": FAILED, "claim": Claim(detail="ok")}),
        ("time", {"status": signal.SIGXCPU}),
        ("time", {"status": signal.SIGKILL, "ended": "wall"}),
        ("time", {"status": signal.SIGKILL, "cpu_s": 6.0}),
        ("crash", {"status": signal.SIGKILL, "cpu_s": 0.1}),
        ("crash", {"status": signal.SIGSEGV}),
        ("crash", {"status": signal.SIGRTMIN + 3}),
        ("files", {"status": signal.SIGXFSZ}),
        ("files", {"status": signal.SIGKILL, "ended": "folder"}),
        ("threads", {"status": signal.SIGKILL, "ended": "threads"}),
        ("output", {"status": signal.SIGXFSZ, "too_long": True}),
        ("output", {"status": 0, "too_long": True}),
    ],
)
def test_a_label_follows_from_the_evidence(expected, evidence):
    found, detail = label(LIMITS, **{"claim": Claim(), **evidence})
    assert found is SandboxLabel(expected)
    assert "\n" not in detail


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[" * 100_000, b'{"detail": 1}', b"\xff", b"null", b'{"cpu_s": 1e999}']
)
def test_a_report_that_is_none_claims_nothing(text):
    assert read_claim(text) == Claim()
