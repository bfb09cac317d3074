"""The folder of a program where the kernel bounds nothing of it."""

import os

from laminar_contrib.sandbox.inside.home import Home


def test_a_folder_with_more_names_than_a_command_takes_is_emptied(tmp_path):
    home = Home(str(tmp_path / "home"))
    home.reset()
    for number in range(9000):
        os.symlink("x", os.path.join(home.path, f"{number:010d}".ljust(255, "x")))
    assert home.is_full(1 << 30)
    assert home.reset()
    assert os.listdir(home.path) == []


def test_the_folder_above_stays_until_the_end(tmp_path):
    home = Home(str(tmp_path / "pool" / "home"))
    home.reset()
    before = (tmp_path / "pool").stat().st_ino
    (tmp_path / "pool" / "home" / "file").touch()
    (tmp_path / "pool").chmod(0o700)
    assert home.reset()
    assert (tmp_path / "pool").stat().st_ino == before
    assert (tmp_path / "pool").stat().st_mode & 0o777 == 0o700
    home.remove()
    assert not (tmp_path / "pool").exists()


def test_a_folder_that_vanishes_at_each_look_counts_as_full(tmp_path, monkeypatch):
    home = Home(str(tmp_path))
    (tmp_path / "inner").mkdir()
    assert not home.is_full(1 << 20)
    found = os.open

    def vanishing(path, *args, **options):
        if path == "inner":
            raise FileNotFoundError(path)
        return found(path, *args, **options)

    monkeypatch.setattr(os, "open", vanishing)
    assert home.is_full(1 << 20)
