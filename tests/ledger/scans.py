"""Statements that a piece of code puts to a ledger, and those of them that read the whole log."""

import sqlite3
from contextlib import contextmanager

from laminar_py.ledger import database
from laminar_py.ledger import ledger as ledger_module


@contextmanager
def statements(monkeypatch):
    """Collect the text of each statement that readers put to a ledger meanwhile."""
    found = []
    opened = database.open_reader

    def watched(path, **options):
        connection = opened(path, **options)
        connection.set_trace_callback(found.append)
        return connection

    with monkeypatch.context() as patched:
        for module in (database, ledger_module):
            patched.setattr(module, "open_reader", watched)
        yield found


def scans_of_the_log(path, asked):
    """Those statements whose plan reads every event."""
    connection = sqlite3.connect(path)
    try:
        return [
            text
            for text in asked
            if any(row[3].startswith("SCAN event") for row in connection.execute(f"EXPLAIN QUERY PLAN {text}"))
        ]
    finally:
        connection.close()
