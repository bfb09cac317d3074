"""Lines that commands print."""

from laminar_py.cli.command import print_line


def test_a_line_comes_out_as_it_is_brackets_included(capsys):
    line = f"laminar train {'long-' * 20}.yaml rollout.engine.urls=[http://a:1] staleness.policies=[drop]"
    print_line(line)
    assert capsys.readouterr().out == f"{line}\n"
