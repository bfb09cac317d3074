"""Ledgers of runs whose folders lie on a file system over a network: what is read there, what a resume takes."""

import os
import shutil
import stat
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from laminar_lab.audit.verify import prove, verify
from laminar_py.config.section import ConfigError
from laminar_py.ledger import live
from laminar_py.ledger.database import LEDGER_NAME, is_copy, log_path, reading
from laminar_py.ledger.ledger import Ledger
from laminar_py.ledger.live import copy_ledger, ledger_disk, network_kind, place_ledger
from laminar_py.ledger.recovery import recover
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.ledger.seal import seal_digest, seal_run
from laminar_py.records.events import RunEnded, SealBroken
from tests.ledger.runs import Ticks, begin, make_ready, open_ledger, read_response


@pytest.fixture
def run(tmp_path):
    (tmp_path / "net/small-1").mkdir(parents=True)
    return RunFolder(tmp_path / "net/small-1")


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@asynccontextmanager
async def led(run, *, killed=False):
    """The ledger of a run that was settled; with `killed` it ends as it would with its process."""
    copy = None if run.live_ledger == run.ledger else run.ledger
    ledger = Ledger(run.live_ledger, host="host-1", clock=Ticks(), copy=copy)
    await ledger.start()
    yield ledger
    if not killed:
        await ledger.close()
        return
    await ledger.commit()
    ledger._task.cancel()
    ledger._reader.close()
    ledger._writer.close()


async def start(run, *, incarnation=1, killed=False, prompts=()):
    """An incarnation whose start is copied, and what it does after that is not."""
    async with led(run, killed=killed) as ledger:
        begin(ledger, incarnation=incarnation, versions=(incarnation - 1,))
        await ledger.commit()
        await ledger.copy()
        for index in prompts:
            make_ready(ledger, f"g{index}.0", index=index)
        if not killed:
            ledger.append(RunEnded(incarnation, "finished"))


def head(ledger):
    with reading(ledger) as connection:
        return connection.execute("SELECT seq, hash FROM head").fetchone()


def issued(ledger):
    with reading(ledger) as connection:
        return [id for (id,) in connection.execute("SELECT id FROM trajectory ORDER BY number")]


async def test_the_run_folder_has_a_whole_ledger_as_of_the_last_copy_and_no_log_of_sqlites(run, disk):
    assert place_ledger(run, disk) == []
    async with led(run) as ledger:
        begin(ledger)
        await ledger.commit()
        await ledger.copy()
        first = head(run.ledger)
        make_ready(ledger, "g0.0")
        await ledger.commit()
        assert head(run.ledger) == first != head(run.live_ledger)
        assert verify(run.path) == []
        await ledger.copy()
        assert head(run.ledger) == head(run.live_ledger)
        assert {path.name for path in run.path.iterdir()} == {LEDGER_NAME, run.segments.name}
        assert stat.S_IMODE(run.live_ledger.parent.stat().st_mode) == 0o700


async def test_a_reader_of_a_copy_sees_one_state_whatever_is_copied_meanwhile(run, disk):
    place_ledger(run, disk)
    async with led(run) as ledger:
        begin(ledger)
        await ledger.commit()
        await ledger.copy()
        with reading(run.path) as connection:
            make_ready(ledger, "g0.0")
            await ledger.commit()
            await ledger.copy()
            assert connection.execute("SELECT count(*) FROM trajectory").fetchone() == (0,)
        assert issued(run.path) == ["g0.0"]


async def test_at_its_end_all_of_a_run_is_in_its_folder_and_is_sealed_there(run, disk):
    place_ledger(run, disk)
    await start(run, prompts=[0])
    assert not run.live_folder(disk).exists()
    seal_run(run.path)
    assert is_copy(run.ledger)
    assert issued(run.path) == ["g0.0"]
    assert prove(run.path).violations == []
    assert prove(run.path).notes[0].startswith("sealed: 2 files")


async def test_a_seal_is_broken_in_the_folder_before_it_is_gone(run, disk):
    place_ledger(run, disk)
    await start(run)
    seal_run(run.path)
    digest, again = seal_digest(run.path), RunFolder(run.path)
    assert place_ledger(again, disk) == []
    async with led(again):
        with reading(run.path) as connection:
            (body,) = connection.execute("SELECT body FROM event WHERE kind = 'sealbroken'").fetchone()
        assert body == f'{{"event":"sealbroken","digest":"{SealBroken(digest).digest}"}}'
        assert seal_digest(run.path) is None
    assert verify(run.path) == []


async def test_a_run_that_was_killed_goes_on_from_its_live_ledger_on_the_same_host(run, disk):
    place_ledger(run, disk)
    await start(run, killed=True, prompts=[0])
    assert issued(run.path) == []
    again = RunFolder(run.path)
    assert place_ledger(again, disk) == []
    assert [live.id for live in recover(run.path, ledger=again.live_ledger).live] == ["g0.0"]
    await start(again, incarnation=2)
    assert issued(run.path) == ["g0.0"]
    assert verify(run.path) == []


async def test_on_another_host_it_goes_on_from_the_copy_and_says_what_is_lost(run, disk, tmp_path):
    place_ledger(run, disk)
    await start(run, killed=True, prompts=[0])
    (tmp_path / "other").mkdir()
    again = RunFolder(run.path)
    lost = f"{run.ledger}: is a copy that host-1 made before it ended; later events are lost"
    assert place_ledger(again, tmp_path / "other") == [lost]
    await start(again, incarnation=2)
    assert issued(run.path) == []
    assert verify(run.path) == []


async def test_a_run_that_ended_loses_nothing_on_another_host(run, disk, tmp_path):
    place_ledger(run, disk)
    await start(run, prompts=[0])
    (tmp_path / "other").mkdir()
    again = RunFolder(run.path)
    assert place_ledger(again, tmp_path / "other") == []
    assert issued(again.live_ledger) == ["g0.0"]


async def test_a_live_ledger_is_put_aside_where_the_run_went_on_elsewhere(run, disk, tmp_path):
    place_ledger(run, disk)
    await start(run, killed=True, prompts=[0])
    left = head(run.live_ledger)
    (tmp_path / "other").mkdir()
    elsewhere = RunFolder(run.path)
    place_ledger(elsewhere, tmp_path / "other")
    await start(elsewhere, incarnation=2, prompts=[1])
    back = RunFolder(run.path)
    aside = run.live_folder(disk).with_name(f"{run.live_folder(disk).name}.1")
    told = f"{run.live_ledger}: does not continue {run.ledger}, so it is not used; it is kept in {aside}"
    assert place_ledger(back, disk) == [told]
    assert head(aside / LEDGER_NAME) == left
    assert issued(back.live_ledger) == ["g1.0"]


async def test_a_live_ledger_of_an_earlier_run_in_that_place_is_put_aside(run, disk):
    place_ledger(run, disk)
    await start(run, killed=True)
    run.ledger.unlink()
    again = RunFolder(run.path)
    (told,) = place_ledger(again, disk)
    assert "belongs to another run than" in told
    assert not again.live_ledger.exists()


async def test_a_live_ledger_that_a_disk_tore_is_put_aside(run, disk):
    place_ledger(run, disk)
    await start(run, killed=True)
    run.live_ledger.write_bytes(b"x" * 5000)
    aside, lost = place_ledger(RunFolder(run.path), disk)
    assert "it is kept in" in aside
    assert lost.endswith("later events are lost")


@pytest.mark.parametrize("left", ["ledger.sqlite.tmp", "ledger.sqlite-wal", "ledger.sqlite"])
async def test_what_was_being_taken_when_it_was_killed_is_taken_anew(run, disk, left):
    place_ledger(run, disk)
    await start(run, prompts=[0])
    folder = run.live_folder(disk)
    folder.mkdir()
    (folder / left).touch()
    again = RunFolder(run.path)
    assert place_ledger(again, disk) == []
    assert [path.name for path in folder.iterdir()] == [LEDGER_NAME]
    assert issued(again.live_ledger) == ["g0.0"]


async def test_a_run_that_was_killed_on_a_disk_goes_on_over_a_network_with_all_of_its_log(run, disk):
    async with led(run, killed=True) as ledger:
        begin(ledger)
        make_ready(ledger, "g0.0")
        await ledger.commit()
        log = log_path(run.ledger).read_bytes()
        whole = run.ledger.read_bytes()
    run.ledger.write_bytes(whole)
    log_path(run.ledger).write_bytes(log)  # closing folded it
    again = RunFolder(run.path)
    assert place_ledger(again, disk) == []
    await start(again, incarnation=2)
    assert {path.name for path in run.path.iterdir()} == {LEDGER_NAME, "segments", "segments.kept"}
    assert issued(run.path) == ["g0.0"]
    assert verify(run.path) == []


async def test_a_run_that_comes_from_a_network_goes_on_in_its_folder(run, disk):
    place_ledger(run, disk)
    await start(run, killed=True, prompts=[0])
    again = RunFolder(run.path)
    (lost,) = place_ledger(again, None)
    assert lost.endswith("later events are lost")
    assert again.live_ledger == run.ledger
    async with open_ledger(run.path) as ledger:
        begin(ledger, incarnation=2, versions=(1,))
    assert not is_copy(run.ledger)
    assert place_ledger(RunFolder(run.path), None) == []
    assert verify(run.path) == []


async def test_of_a_killed_run_what_other_hosts_have_is_noted_and_no_violation(run, disk):
    place_ledger(run, disk)
    await start(run, killed=True, prompts=[0])
    async with led(RunFolder(run.path), killed=True):
        pass
    copy_ledger(run.live_ledger, run.ledger)
    assert prove(run.path).violations == []
    shutil.rmtree(run.segments.readlink())  # as another host sees it
    proof = prove(run.path)
    assert proof.violations == []
    assert "1 responses are on other hosts of the run, and were not read" in proof.notes
    with pytest.raises(ConfigError, match=r"g0\.0: its tokens cannot be read \(on another host of the run"):
        read_response(run.path, "g0.0")


async def test_a_run_that_goes_back_to_a_copy_knows_it(run, disk):
    place_ledger(run, disk)
    assert not run.went_back, "it begins"
    await start(run, killed=True, prompts=[0])
    again = RunFolder(run.path)
    place_ledger(again, disk)
    assert not again.went_back, "its live ledger is there"
    assert again.segments.readlink() == run.segments.readlink(), "and so is what it stored"
    elsewhere = RunFolder(run.path)
    (disk / "other").mkdir()
    place_ledger(elsewhere, disk / "other")
    assert elsewhere.went_back


def on(*network):
    """Stands for the kernel's list: what is below these folders lies on NFS."""
    return lambda folder: "nfs4" if any(folder.is_relative_to(one) for one in network) else None


def test_only_a_run_over_a_network_needs_another_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "network_kind", on(tmp_path / "net"))
    assert ledger_disk(tmp_path / "runs", tmp_path / "missing") is None
    assert ledger_disk(tmp_path / "net", tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("disk", "fault"), [("missing", "is no folder that can be written"), ("net", "lies on nfs4")]
)
def test_where_no_disk_is_fit_the_run_is_refused_in_one_line(tmp_path, monkeypatch, disk, fault):
    monkeypatch.setattr(live, "network_kind", on(tmp_path / "net"))
    (tmp_path / "net").mkdir()
    with pytest.raises(ConfigError) as refusal:
        ledger_disk(tmp_path / "net/runs", tmp_path / disk)
    runs = tmp_path / "net/runs"
    assert str(refusal.value) == (
        f"runs_local={tmp_path / disk}: {fault}, and no ledger can be written in {runs}, which lies on nfs4;"
        " set it to a folder on a disk of this host"
    )


def test_a_folder_that_another_user_made_in_its_place_is_refused_in_one_line(run, disk, monkeypatch):
    run.live_folder(disk).mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(
        ConfigError, match=r"^runs_local=.*: laminar-ledger-net-small-1-.* in it belongs to another user; name"
    ):
        place_ledger(run, disk)


def test_a_place_that_cannot_be_made_is_refused_in_one_line(run, disk):
    with pytest.raises(ConfigError, match=r"^runs_local=.*/gone: cannot create laminar-ledger-.* there \(No such"):
        place_ledger(run, disk / "gone")


ROOT = "27 1 0:0 / / rw,relatime - ext4 /dev/vda rw"


def mounts(folder, kind):
    """A list in which the device of a folder has a file system of that kind."""
    device = os.stat(folder).st_dev
    mine = f"31 27 {os.major(device)}:{os.minor(device)} /runs /mnt/my\\040runs rw shared:7"
    return f"{ROOT}\n{mine} - {kind} server:/runs rw\n"


@pytest.mark.parametrize(
    "kind",
    ["nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "wekafs", "fuse.sshfs"],
)
def test_what_goes_over_a_network_is_named(tmp_path, kind):
    assert network_kind(tmp_path, mounts(tmp_path, kind)) == kind
    assert network_kind(tmp_path / "not/yet/there", mounts(tmp_path, kind)) == kind


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuseblk", "fuse.mergerfs"])
def test_disks_of_this_host_and_its_memory_are_no_network(tmp_path, kind):
    assert network_kind(tmp_path, mounts(tmp_path, kind)) is None


def test_a_link_to_a_folder_is_where_that_folder_is(tmp_path):
    (tmp_path / "link").symlink_to("/proc/self", target_is_directory=True)
    assert network_kind(tmp_path / "link", mounts(tmp_path, "nfs4")) is None


def test_a_device_that_is_not_listed_is_no_network(tmp_path):
    assert network_kind(tmp_path, ROOT) is None


def test_this_hosts_own_list_is_read(tmp_path):
    assert network_kind(tmp_path / "a") == network_kind(tmp_path)
    assert network_kind(Path("/dev/shm")) is None
