"""Settings that a user asks of a running run, and settings on record.

`laminar set` and `laminar scale` write a line of `key=value` settings, a set that is changed as one, into a file
of the run's folder, which may be on a network. The controller takes the file, records the changes, and then
deletes it. A request is for the controller that has the run's lock: the next one discards it and says so. A
resumed run has the last recorded values and fleet, and its `config.yaml` stays as the user wrote it
(`tests/runs/test_elastic_run.py`).
"""

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from laminar_py.config.changes import REPLICAS, values_named
from laminar_py.config.engine import QUANTIZATION, Quantization
from laminar_py.config.loading import load_config
from laminar_py.ledger.database import reading
from laminar_py.ledger.rows import read_events
from laminar_py.ledger.run_folder import LOCK, RunFolder
from laminar_py.records.events import Event, RunStarted, Scaled, SettingChanged, Unquantized
from laminar_py.records.host import write_file

WANTED = "wanted_settings"
FLEET_SETTINGS = ("rollout.replicas=", "rollout.engine.", "rollout.engine=", "rollout=")


def write_wanted(run: Path, settings: Sequence[str]) -> None:
    """Ask for a set of settings, e.g. `rollout.replicas=4`; they replace values of theirs that still wait."""
    wanted = run / WANTED
    try:
        waiting = [] if _is_old(wanted) else wanted.read_text().splitlines()
    except FileNotFoundError:
        waiting = []
    names = {setting.partition("=")[0] for setting in settings}
    sets = [[one for one in line.split() if one.partition("=")[0] not in names] for line in waiting]
    partial = run / f"{WANTED}.tmp"
    write_file(partial, "".join(f"{' '.join(one)}\n" for one in [*sets, settings] if one).encode())
    partial.replace(wanted)


def take_wanted(run: Path, number: int) -> list[list[str]]:
    """Return the wanted sets of settings; none without a file, or if it cannot be read now.

    They stay in a file of this `number` until `forget_wanted`, and a call with the same number returns them again.
    """
    taken = _taken(run, number)
    try:
        if not taken.exists():
            (run / WANTED).replace(taken)  # a setting that is written from now on is the next
        return [line.split() for line in taken.read_bytes().decode().splitlines()]
    except UnicodeDecodeError:
        forget_wanted(run, number)
    except OSError:  # the network may fail for a moment
        pass
    return []


def forget_wanted(run: Path, number: int) -> None:
    """Delete the file of taken settings once they are on record."""
    with contextlib.suppress(OSError):
        _taken(run, number).unlink()


def discard_old(run: Path) -> list[str]:
    """Delete requests from before this controller got the run's lock; return their settings."""
    found = list[str]()
    for file in sorted(run.glob(f"{WANTED}*")):
        with contextlib.suppress(OSError):
            if _is_old(file):
                text = file.read_bytes().decode(errors="replace")
                file.unlink()
                found += text.split()
    return found


def _taken(run: Path, number: int) -> Path:
    return run / f"{WANTED}.taken-{number}"


def _is_old(file: Path) -> bool:
    """Whether a file is older than the lock of its run, by the clock of their file system."""
    lock = file.with_name(LOCK)
    return lock.exists() and file.stat().st_mtime_ns < lock.stat().st_mtime_ns


def settings_on_record(run: RunFolder, changes: Sequence[str]) -> list[str]:
    """Return settings that restore the last recorded fleet and settings, without any that `changes` name.

    A setting that a resume named has the value of this resume, unless it changed later.
    """
    if not run.has_ledger:
        return []
    with reading(run.ledger) as connection:
        events = list(read_events(connection, RunStarted, Scaled, SettingChanged))
    values = _without(last_settings(events), changes)
    kept = [f"{name}={'null' if value is None else value}" for name, value in values.items()]
    fleet = next((event for event in reversed(events) if isinstance(event, Scaled)), None)
    if fleet is None or any(change.startswith(FLEET_SETTINGS) for change in changes):
        return kept
    urls = [f"rollout.engine.urls=[{','.join(fleet.servers)}]"] if fleet.servers else []
    return [f"rollout.replicas={len(fleet.replicas)}", *urls, *kept]


def rounding_on_record(run: RunFolder, changes: Sequence[str]) -> list[str]:
    """Return the setting by which engines stay unquantised, to be read after the `changes` of a resume.

    None if this resume has a bound above every mismatch for which engines went back to published weights.
    """
    if not run.has_ledger:
        return []
    bound = load_config(run.config, list(changes)).rollout.engine.max_mismatch
    with reading(run.ledger) as connection:
        ended = list(read_events(connection, Unquantized))
    stays = any(bound is None or event.mismatch > bound for event in ended)
    return [f"{QUANTIZATION}={Quantization.NONE}"] if stays else []


def last_settings(events: Iterable[Event]) -> dict[str, int | None]:
    """Return the last value of each changed setting by name, the fleet's left out.

    A later resume that names the setting changes it too, although its `config.yaml` has the value only once its
    learner has started.
    """
    values: dict[str, int | None] = {}
    for event in events:
        if isinstance(event, RunStarted):
            values = _without(values, event.overrides) | values_named(event.overrides)
            values.pop(REPLICAS, None)
        elif isinstance(event, SettingChanged):
            values[event.name] = event.value
    return values


def settings_by_hand(run: RunFolder, changes: Sequence[str]) -> list[str]:
    """Return names of settings that a user changed in a running run, unless a resume or `changes` name them."""
    if not run.has_ledger:
        return []
    with reading(run.ledger) as connection:
        return list(_without(changed_by_hand(read_events(connection, RunStarted, SettingChanged)), changes))


def changed_by_hand(events: Iterable[Event]) -> dict[str, int | None]:
    """Return the last value by name of each setting that a user changed, unless a later resume named it."""
    values: dict[str, int | None] = {}
    for event in events:
        if isinstance(event, RunStarted):
            values = _without(values, event.overrides)
        elif isinstance(event, SettingChanged) and event.by == "user":
            values[event.name] = event.value
    return values


def _without(values: dict[str, int | None], changes: Iterable[str]) -> dict[str, int | None]:
    """Return values by setting, without settings that `key=value` changes name, alone or by their section."""
    keys = tuple(f"{change.partition('=')[0]}." for change in changes)
    return {name: value for name, value in values.items() if not f"{name}.".startswith(keys)}
