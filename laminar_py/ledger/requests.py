"""Settings that a user asks of a running run, and settings on record.

`laminar set` and `laminar scale` write `key=value` lines into a file of the run's folder, which may be on a
network. The controller takes the file, and records each change. A resumed run has the last recorded values and
fleet, and its `config.yaml` stays as the user wrote it (`tests/runs/test_elastic_run.py`).
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from laminar_py.ledger.database import reading
from laminar_py.ledger.rows import read_events
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.events import Event, RunStarted, Scaled, SettingChanged
from laminar_py.records.host import write_file

WANTED = "wanted_settings"
FLEET_SETTINGS = ("rollout.replicas=", "rollout.engine.", "rollout.engine=", "rollout=")


def write_wanted(run: Path, settings: Sequence[str]) -> None:
    """Ask for settings, e.g. `rollout.replicas=4`; they replace values of theirs that still wait."""
    try:
        waiting = (run / WANTED).read_text().splitlines()
    except FileNotFoundError:
        waiting = []
    names = {setting.partition("=")[0] for setting in settings}
    lines = [*(line for line in waiting if line.partition("=")[0] not in names), *settings]
    partial = run / f"{WANTED}.tmp"
    write_file(partial, "".join(f"{line}\n" for line in lines).encode())
    partial.replace(run / WANTED)


def take_wanted(run: Path) -> list[str]:
    """Return and delete the wanted settings; none without a file, or if it cannot be read."""
    taken = run / f"{WANTED}.taken"
    try:
        (run / WANTED).replace(taken)  # a setting that is written from now on is the next
        written = taken.read_bytes()
        taken.unlink()
        return written.decode().splitlines()
    except (OSError, UnicodeDecodeError):  # the network may fail for a moment
        return []


def settings_on_record(run: RunFolder, changes: Sequence[str]) -> list[str]:
    """Return settings that restore the last recorded fleet and settings, without any that `changes` name.

    A setting that a resume named has the value of this resume, unless it changed later.
    """
    if not run.has_ledger:
        return []
    with reading(run.ledger) as connection:
        events = list(read_events(connection, RunStarted, Scaled, SettingChanged))
    kept = [f"{name}={value}" for name, value in _without(last_settings(events), changes).items()]
    fleet = next((event for event in reversed(events) if isinstance(event, Scaled)), None)
    if fleet is None or any(change.startswith(FLEET_SETTINGS) for change in changes):
        return kept
    urls = [f"rollout.engine.urls=[{','.join(fleet.servers)}]"] if fleet.servers else []
    return [f"rollout.replicas={len(fleet.replicas)}", *urls, *kept]


def last_settings(events: Iterable[Event]) -> dict[str, int]:
    """Return the last value of each changed setting by name, without settings that a later resume named."""
    values: dict[str, int] = {}
    for event in events:
        if isinstance(event, RunStarted):
            values = _without(values, event.overrides)
        elif isinstance(event, SettingChanged):
            values[event.name] = event.value
    return values


def _without(values: dict[str, int], changes: Iterable[str]) -> dict[str, int]:
    """Return values by setting, without settings that `key=value` changes name, alone or by their section."""
    keys = tuple(f"{change.partition('=')[0]}." for change in changes)
    return {name: value for name, value in values.items() if not f"{name}.".startswith(keys)}
