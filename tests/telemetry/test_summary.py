"""What the summary says of relay and checkpoints, from the ledger of a run."""

from laminar_py.cli.train import tell_checkpoints, tell_relay
from laminar_py.ledger.database import reading
from laminar_py.records.events import Checkpointed, Relayed, VersionPublished
from laminar_py.telemetry.summary import CheckpointFigures, RelayFigures, read_checkpoints, read_relay
from tests.ledger.runs import begin, open_ledger


def relayed(node, version, wire_bytes, elapsed_s):
    base = version - 1 if version else None
    return Relayed(
        node=f"relay-{node}",
        version=version,
        digest=f"digest{version}",
        num_bytes=1000,
        base=base,
        wire_bytes=wire_bytes,
        first_byte_s=0.0,
        elapsed_s=elapsed_s,
    )


async def test_the_relay_is_summed_up_from_the_ledger(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=())
        for version, stall_s in enumerate((0.1, 0.3, 0.0, 0.2)):  # the learner died over version 2
            ledger.append(
                VersionPublished(
                    version=version,
                    step=version,
                    incarnation=1,
                    parent=None,
                    digest=f"digest{version}",
                    num_bytes=1000,
                    stall_s=stall_s,
                )
            )
            ledger.append(relayed(0, version, 0, 0.0))
            ledger.append(relayed(1, version, 10 if version else 1000, 1.0 + version))
            ledger.append(relayed(2, version, 10 if version else 1000, 2.0))
    with reading(tmp_path) as connection:
        figures = read_relay(connection)
    assert figures == RelayFigures(4, 0.2, 2.5, 2060 / 8000)
    assert tell_relay(figures) == (
        "4 versions, the learner stood still 200.0 ms for one, 2.50 s until the last relay had it, 25.8% of the"
        " bytes over the wire"
    )


async def test_a_lone_root_has_nothing_to_say_of_the_wire(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0,))
        ledger.append(relayed(0, 0, 0, 0.0))
    with reading(tmp_path) as connection:
        figures = read_relay(connection)
    assert figures == RelayFigures(1, 0.1, None, None)
    assert tell_relay(figures) == "1 versions, the learner stood still 100.0 ms for one"


async def test_checkpoints_are_summed_up_from_the_ledger(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        for step, stall_s in enumerate((0.1, 0.002, 0.003)):
            ledger.append(
                Checkpointed(
                    step=step, version=0, path=f"checkpoints/step-{step}", stall_s=stall_s, elapsed_s=0.5 + step
                )
            )
    with reading(tmp_path) as connection:
        figures = read_checkpoints(connection)
    assert figures == CheckpointFigures(3, 0.003, 1.5)
    assert tell_checkpoints(figures) == "3, the learner stood still 3.0 ms for one, 1.50 s until it was on disk"
