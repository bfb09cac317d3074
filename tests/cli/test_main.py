"""Lines that commands print."""

import errno

import pytest

from laminar_py.cli import command
from laminar_py.cli.command import print_line
from laminar_py.config import ConfigError


def test_a_line_comes_out_as_it_is_brackets_included(capsys):
    line = f"laminar train {'long-' * 20}.yaml rollout.engine.urls=[http://a:1] staleness.policies=[drop]"
    print_line(line)
    assert capsys.readouterr().out == f"{line}\n"


def test_a_path_that_the_user_may_not_read_is_bad_input(capsys, monkeypatch):
    def refuse() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/root/model/config.json")

    monkeypatch.setattr(command, "app", refuse)
    with pytest.raises(SystemExit) as end:
        command.run()
    line = "laminar: /root/model/config.json: Permission denied; grant access to it, or name another path\n"
    assert (end.value.code, capsys.readouterr().err) == (2, line)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("warm", "laminar warm: this checkout has it, and its installation is older; run pip install -e "),
        ("warn", ""),
    ],
)
def test_a_command_that_the_installation_lacks_has_a_remedy(name, said, monkeypatch):
    monkeypatch.setattr(command, "entry_points", lambda **wanted: ())
    if not said:
        assert command.Commands().get_command(None, name) is None, "an unknown name stays click's"
        return
    with pytest.raises(ConfigError, match=f"^{said}"):
        command.Commands().get_command(None, name)
