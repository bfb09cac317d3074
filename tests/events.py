"""Events of a run with usual fields; a test gives those that it is about."""

import numpy as np

from laminar_py.ledger.database import SCHEMA_VERSION
from laminar_py.records.engine import SamplingParams
from laminar_py.records.events import Finished, Issued, Relayed, RunStarted, Stepped, VersionPublished
from laminar_py.records.replica import Assignment
from laminar_py.records.trajectory import FinishReason, Kind


def run_started(**fields):
    """A first controller, which drops nothing stale and drains nothing."""
    usual = {"incarnation": 1, "host": "host-1", "pid": 7, "schema": SCHEMA_VERSION, "config_digest": "c0"}
    return RunStarted(**{**usual, "drain": False, "max_staleness": None, **fields})


def issued(id, **fields):
    """A training trajectory of the problem p0; its group and sample are in its name, as in "g3.1"."""
    group, _, sample = id.rpartition(".")
    usual = {"group_id": group, "prompt_id": "p0", "prompt_index": 0, "sample_index": int(sample)}
    return Issued(trajectory_id=id, **{**usual, "kind": Kind.TRAIN, **fields})


def make_assignment(id, **fields):
    """The first assignment of a trajectory of g0."""
    usual = {"epoch": 1, "group_id": "g0", "kind": Kind.TRAIN, "prompt_ids": np.array([3, 4, 5], np.int32)}
    return Assignment(trajectory_id=id, **{**usual, "sampling": SamplingParams(max_new_tokens=1), **fields})


def finished(id, spans, **fields):
    """The end of a response whose last token is the last span's, in its first epoch."""
    usual = {"epoch": 1, "length": spans[-1].end if spans else 0, "digest": "d", "queue_s": 0.1, "generate_s": 0.2}
    return Finished(
        trajectory_id=id, spans=tuple(spans), **{**usual, "finish_reason": FinishReason.STOP, **fields}
    )


def stepped(step, **fields):
    """A learner step."""
    figures = {"loss": 0.1, "grad_norm": 0.2, "reward": 1.0, "elapsed_s": 0.3}
    return Stepped(step=step, **{"incarnation": 1, **figures, **fields})


def version_published(version, **fields):
    """Weights of the step of the same number."""
    usual = {"step": version, "incarnation": 1, "parent": None, "digest": f"digest{version}"}
    return VersionPublished(version=version, **{**usual, "num_bytes": 10, "stall_s": 0.0, **fields})


def relayed(node, version, **fields):
    """Whole weights at a relay."""
    usual = {"digest": f"digest{version}", "num_bytes": 10, "base": None, "wire_bytes": 10, "first_byte_s": 0.0}
    return Relayed(node=node, version=version, **{**usual, **fields})
