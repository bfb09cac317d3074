"""The benchmark of the ledger in its smallest form: every figure comes, and those that no load changes hold."""

from laminar_py.bench.ledger import rows


def test_every_figure_comes_once():
    found = {row.name: row.value for row in rows(trajectories=6000, tell=lambda line: None)}
    recording = ["append_cpu", "writer_cpu", "archive_cpu", "accounting_while_read", "read_while_written"]
    reading = ["verify", "verify_cpu", "verify_memory", "show_p50", "show_max", "show_command"]
    disk = ["ledger_bytes", "archive_bytes"]
    assert sorted(found) == sorted(["accounting", "accounting_cpu", *recording, *reading, *disk])
    assert 1 < found["ledger_bytes"] < 5
    assert 0 < found["archive_bytes"] < 2
