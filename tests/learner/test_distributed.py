"""The process group of ranks: its environment and its time limits. A GPU's part is shown by the order of calls."""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from laminar_py.learner import distributed, model
from laminar_py.learner.distributed import COLLECTIVE_S, STANDS_S, Ranks, join_group, leave_group
from laminar_py.records.metrics import RankPosition
from tests.learner.ranks import run_ranks

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.mark.parametrize("given", [{}, {"NCCL_SOCKET_IFNAME": "^docker0,lo"}, dict.fromkeys(NAMES, "lo")])
def test_the_interfaces_of_the_user_stay_and_ours_go_with_the_group(tmp_path: Path, monkeypatch, given):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    join_group(str(tmp_path / "rendezvous"), rank=0, world_size=1)
    joined = {name: os.environ[name] for name in NAMES}
    leave_group()
    assert joined == dict.fromkeys(NAMES, "lo") | given
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == given


def test_collectives_have_a_time_limit_of_ours(tmp_path: Path, monkeypatch):
    asked = []
    join = dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **kw: asked.append(kw) or join(*a, **kw))
    join_group(str(tmp_path / "rendezvous"), rank=0, world_size=1)
    leave_group()
    assert [kw["timeout"] for kw in asked] == [timedelta(seconds=COLLECTIVE_S)]


def late_rank(rank: int, folder: Path) -> None:
    """Rank 0 comes after more than the limit of a collective, as after a warm start."""
    distributed.COLLECTIVE_S = 1
    if rank == 0:
        time.sleep(3)
    join_group(str(folder / "rendezvous"), rank=rank, world_size=2)
    (folder / str(rank)).touch()
    leave_group()


@pytest.mark.slow
def test_ranks_wait_for_the_warm_start_of_rank_0(tmp_path: Path):
    run_ranks(late_rank, tmp_path, world_size=2)
    assert {path.name for path in tmp_path.iterdir()} >= {"0", "1"}


@pytest.mark.parametrize("own", [None, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_rank_on_cuda_has_expandable_segments_before_the_device_is_used(tmp_path: Path, monkeypatch, own):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if own:
        monkeypatch.setenv(own, "max_split_size_mb:64")
    seen = []
    settings = lambda: {name: value for name, value in os.environ.items() if name.endswith("ALLOC_CONF")}  # noqa: E731
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(settings()))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(distributed, "init_device_mesh", lambda *_, **__: None)
    join_group(str(tmp_path / "rendezvous"), rank=0, world_size=1, device_type="cuda")
    leave_group()
    expected = {own: "max_split_size_mb:64"} if own else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert seen == [expected]


class Shard:
    """Stands for a DTensor: notes the calls, in order."""

    is_floating_point = staticmethod(lambda: True)

    def __init__(self, num_ranks: int) -> None:
        self.calls: list[object] = []
        self.device_mesh = type("Mesh", (), {"device_type": "cuda", "size": lambda _: num_ranks})()

    def to(self, where: object) -> "Shard":
        self.calls.append(where)
        return self

    def detach(self) -> "Shard":
        return self

    def full_tensor(self) -> torch.Tensor:
        self.calls.append("gather")
        return torch.zeros(1)


@pytest.mark.parametrize(("num_ranks", "calls"), [(1, []), (2, ["cuda"])])
def test_an_offloaded_shard_is_cast_then_moved_to_the_meshs_device_then_gathered(monkeypatch, num_ranks, calls):
    monkeypatch.setattr(model, "DTensor", Shard)
    shard = Shard(num_ranks)
    model.gather_full(shard, torch.bfloat16)
    assert shard.calls == [torch.bfloat16, *calls, "gather"]


def waiting_rank(rank: int, folder: Path) -> None:
    """Rank 1 enters a collective once a thread of rank 0 has seen that rank 0 waits in it."""
    ranks = Ranks(join_group(str(folder / "rendezvous"), rank=rank, world_size=2))
    seen, before = folder / "seen", ranks.position.collectives

    def watch() -> None:
        while ranks.position.collectives == before:
            time.sleep(0.01)
        assert ranks.position == RankPosition("sums", STANDS_S, 1, before + 1)
        seen.touch()

    if rank == 0:
        threading.Thread(target=watch).start()
    else:
        while not seen.exists():
            time.sleep(0.01)
        assert ranks.position.collectives == before
    ranks.begin("sums")
    assert ranks.sum(1.0) == 2.0
    assert ranks.position.collectives == before + 1
    leave_group()


def test_another_thread_sees_in_which_collective_a_rank_waits(tmp_path: Path):
    run_ranks(waiting_rank, tmp_path, world_size=2)
    assert (tmp_path / "seen").exists()
