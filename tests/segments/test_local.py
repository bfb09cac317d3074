"""Segments on a disk of each host: where a link leads, at any moment and wherever it is followed."""

import os
import stat

import pytest

from laminar_py.ledger.segments import local
from laminar_py.ledger.segments.local import drop_local, is_local, keep_here, lead_to_kept, link_local
from laminar_py.ledger.segments.reader import ElsewhereError, PayloadReader
from laminar_py.ledger.segments.writer import SegmentWriter, segment_files, segments_in
from laminar_py.records.codec import decode, encode
from laminar_py.records.pieces import PayloadLostError
from tests.segments.pieces import random_piece


class Host:
    """A host that sees the run's folder over the network and has a disk of its own behind `name`."""

    def __init__(self, tmp_path, name):
        (tmp_path / name).mkdir()
        (tmp_path / "run").mkdir(exist_ok=True)
        self.place = tmp_path / name / "laminar-segments-1"
        self.folder = tmp_path / "run/segments"

    def follow(self):
        """Stand for this host: the link leads to its own disk."""
        self.folder.unlink(missing_ok=True)
        self.folder.symlink_to(self.place)

    def write(self):
        self.follow()
        writer = SegmentWriter(self.folder, "replica-0-1-0")
        ref = writer.write(random_piece(tokens=20))
        writer.close()
        return ref


def names(*refs):
    return segment_files(ref.segment for ref in refs)


@pytest.fixture
def host(tmp_path):
    one = Host(tmp_path, "disk")
    link_local(one.folder, one.place)
    return one


def test_what_is_written_lies_on_the_own_disk_in_a_folder_of_this_user_alone(host):
    ref = host.write()
    assert is_local(host.folder)
    assert [path.name for path in segments_in(host.place)] == names(ref)
    assert stat.S_IMODE(host.place.stat().st_mode) == 0o700
    assert PayloadReader(host.folder).load([ref]).piece(ref)


def test_a_folder_that_another_user_made_is_not_written_to(host, monkeypatch):
    host.place.mkdir()
    monkeypatch.setattr(local.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        host.write()


def test_a_host_without_that_disk_writes_nowhere_else(host):
    host.place.parent.rmdir()
    with pytest.raises(FileNotFoundError):
        host.write()


def test_at_the_end_all_that_is_needed_of_all_hosts_is_in_the_runs_folder_and_nothing_else(tmp_path, host):
    other = Host(tmp_path, "other")
    first, second, idle = host.write(), other.write(), host.write()
    for one in (host, other):
        one.follow()
        assert decode(int, keep_here(str(one.folder), encode(names(first, second)))) == 1
    lead_to_kept(host.folder, names(first, second))
    assert not is_local(host.folder)
    for one in (host, other):
        drop_local(str(one.place))
        assert not one.place.exists()
    reader = PayloadReader(host.folder)
    assert reader.load([first]).piece(first)
    assert reader.load([second]).piece(second)
    with pytest.raises(PayloadLostError) as caught:
        reader.load([idle]).piece(idle)
    assert not isinstance(caught.value, ElsewhereError), "there is no elsewhere any more"
    assert {path.name for path in host.folder.iterdir()} == set(names(first, second))


def test_a_run_that_goes_on_has_what_was_kept_on_its_controllers_disk(tmp_path, host):
    ref = host.write()
    keep_here(str(host.folder), encode(names(ref)))
    lead_to_kept(host.folder, names(ref))
    drop_local(str(host.place))
    again = Host(tmp_path, "elsewhere")
    link_local(host.folder, again.place)
    assert [path.name for path in segments_in(again.place)] == names(ref)
    assert PayloadReader(host.folder).load([ref]).piece(ref)
    third = Host(tmp_path, "third")  # the run was killed, and goes on on yet another host
    link_local(host.folder, third.place)
    assert [path.name for path in segments_in(third.place)] == names(ref)


@pytest.mark.parametrize("calls", range(8))
def test_killed_anywhere_over_its_end_a_run_has_all_of_it(host, monkeypatch, calls):
    refs = [host.write() for _ in range(3)]
    left = calls

    def counting(function):
        def call(*arguments, **options):
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(local.shutil, "copyfile", counting(local.shutil.copyfile))
    monkeypatch.setattr(local, "sync", counting(local.sync))
    try:
        keep_here(str(host.folder), encode(names(*refs)))
        lead_to_kept(host.folder, names(*refs))
        drop_local(str(host.place))
    except KeyboardInterrupt:
        pass
    reader = PayloadReader(host.folder)
    assert all(reader.load([ref]).piece(ref) for ref in refs)


def test_who_reads_a_killed_run_on_another_host_is_told_that_the_piece_is_not_here(tmp_path, host):
    ref = host.write()
    Host(tmp_path, "other").follow()
    with pytest.raises(ElsewhereError):
        PayloadReader(host.folder).load([ref]).piece(ref)
