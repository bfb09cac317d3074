"""`laminar doctor --try`: measures the machines that a config would use, then tries the config on them.

Rows come in this order: the placement by formula, each node's software and memory copies, collectives over the
learner's ranks, and a short run (`laminar_lab.doctor.trial`).
"""

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from laminar_lab.doctor.checks import Fit, fit
from laminar_lab.doctor.probes import NodeProbe, end_children, measured, probe_node, run_ranks
from laminar_lab.doctor.trial import try_run
from laminar_lab.doctor.trial_profile import SelfTest
from laminar_lab.doctor.trial_rows import TRIAL, TriedRow, Verdict, judged, rate_row
from laminar_py.config import RunConfig
from laminar_py.config.cluster import Device
from laminar_py.records.codec import decode
from laminar_py.runtime.cluster import Needs, NoAnswerError, Placement, free_port, nodes, on_node, open_cluster

GPU_COPY, SHM_WRITE = 20e9, 1e9  # bytes per second: PCIe 4 with 16 lanes, and one core that writes
NVLINK, NETWORK, LOOPBACK = 100e9, 5e9, 0.1e9  # bytes per second and rank of a collective
NODE_S = 180.0

Show = Callable[[str], None]
Found = TypeVar("Found")


def self_test(config: RunConfig, *, seconds: float, show: Show) -> SelfTest:
    """Measure and try everything; a failed placement ends it. `show` gets the name of each part that begins."""
    show("placement and memory, by formula")
    rows = [_placement_row(fit(config))]
    if rows[0].verdict is not Verdict.OK:
        return SelfTest(rows=rows)
    with open_cluster(config.cluster.address):
        placement = Placement(Needs.from_config(config), nodes)
        show("each node's software, and copies between its memories")
        of_nodes, gpu = _run(_probe_nodes(config, placement))
        rows += of_nodes
        if config.learner.world_size > 1:
            show("collectives over the learner's ranks")
            rows += _run(_collective_rows(config, placement))
    show(f"a short run of the config, in {seconds:g} s at most")
    of_trial, model = try_run(config, seconds=seconds)
    learner_nodes = len({place.node for place in placement.plan.learner})
    return SelfTest(rows=[*rows, *of_trial], gpu=gpu, learner_nodes=learner_nodes, model=model)


def _run(probing: Coroutine[None, None, Found]) -> Found:
    """Run probes to their end. A Ctrl-C ends their processes, since no thread that waits for them can be ended."""

    async def guarded() -> Found:
        try:
            return await probing
        finally:
            end_children()

    return asyncio.run(guarded())


def planned_rows(config: RunConfig, placed: Fit) -> list[TriedRow]:
    """Return the rows that a self-test of this config would fill."""
    on_gpu = config.learner_device is Device.CUDA
    names = ["software", "compilers", "shared memory"] + ["host to GPU", "GPU to host"] * on_gpu
    names += ["all-reduce", "reduce-scatter"] * (config.learner.world_size > 1)
    return [
        _placement_row(placed),
        *(TriedRow(what=what, asked="") for what in (*names, *TRIAL, "the run's laws")),
    ]


def _placement_row(placed: Fit) -> TriedRow:
    faults = [*([] if placed.unplaced is None else [str(placed.unplaced)]), *placed.faults]
    return judged(
        "placement and memory",
        "a place for every part",
        faults[0] if faults else "fits by formula",
        failed=bool(faults),
        remedy="as it says; laminar doctor CONFIG lists all faults",
    )


# ---- nodes


async def _probe_nodes(config: RunConfig, placement: Placement) -> tuple[list[TriedRow], str]:
    """Probe all nodes of the plan at once; of equal rows of several nodes the worst is kept, with its node.

    Also returns the name of a GPU; "" without one.
    """
    plan = placement.plan
    on_gpus = {place.node for place in (*plan.learner, *plan.replicas) if place is not None and place.gpus}
    calls = [_probe(config, node, has_gpus=node in on_gpus) for node in sorted(plan.nodes)]
    found = await asyncio.gather(*calls)
    by_what = defaultdict(list)
    for node, (rows, _) in zip(sorted(plan.nodes), found, strict=True):
        for row in rows:
            by_what[row.what].append((row, placement.ip(node)))
    gpu = next((gpu for _, gpu in found if gpu), "")
    return [_worst(rows, named=len(plan.nodes) > 1) for rows in by_what.values()], gpu


def _worst(rows: Sequence[tuple[TriedRow, str]], *, named: bool) -> TriedRow:
    order = [Verdict.FAILED, Verdict.SLOW, Verdict.OK]
    row, ip = min(rows, key=lambda one: (order.index(one[0].verdict), one[0].value or 0.0))
    return replace(row, measured=f"{row.measured} ({ip})") if named else row


async def _probe(config: RunConfig, node: str, *, has_gpus: bool) -> tuple[list[TriedRow], str]:
    try:
        async with asyncio.timeout(NODE_S):
            answer = await on_node(node, probe_node, str(config.relay.shm), "yes" if has_gpus else "")
    except (NoAnswerError, TimeoutError) as error:
        said = str(error) or f"no answer within {NODE_S:g} s"
        remedy = "install the environment of this machine there"
        return [judged("software", "the node answers", said, failed=True, remedy=remedy)], ""
    probe = decode(NodeProbe, answer)
    return list(_rows_of(config, probe, has_gpus=has_gpus)), next(iter(probe.gpus), "")


def _rows_of(config: RunConfig, probe: NodeProbe, *, has_gpus: bool) -> Iterator[TriedRow]:
    gpus = f", {len(probe.gpus)} x {probe.gpus[0]}, driver {probe.driver}" if probe.gpus else ""
    yield judged(
        "software",
        "torch sees the GPUs" if has_gpus else "torch",
        f"torch {probe.torch}{gpus}",
        failed=has_gpus and not probe.gpus,
        remedy="torch for CUDA, and a driver for its CUDA version",
    )
    wanted = config.learner.compile or has_gpus
    lacking = [] if probe.compiler else ["no C++ compiler"]
    lacking += [] if probe.headers else ["no headers of Python"]
    yield judged(
        "compilers",
        "a C++ compiler, and Python's headers" if wanted else "nothing is compiled",
        " and ".join(lacking) or f"{probe.compiler}, Python.h",
        failed=wanted and bool(lacking),
        remedy="apt-get install g++ python3-dev",
    )
    if probe.shm_bytes_per_s:
        yield rate_row("shared memory", SHM_WRITE, probe.shm_bytes_per_s, remedy="other load on the host's memory")
    else:
        free = f"{probe.shm_free / 2**20:.0f} MiB free"
        remedy = "docker run --shm-size, or another folder in relay.shm"
        yield judged("shared memory", f"room in {config.relay.shm}", free, failed=True, remedy=remedy)
    for what, rate in (("host to GPU", probe.to_gpu), ("GPU to host", probe.from_gpu)):
        if rate is not None:
            yield rate_row(what, GPU_COPY, rate, remedy="the slot's PCIe lanes, the limit of locked memory")


# ---- collectives


async def _collective_rows(config: RunConfig, placement: Placement) -> list[TriedRow]:
    """Run all ranks on their nodes at once, and return the rates of the slowest."""
    places: dict[str, list[int]] = defaultdict(list)
    for rank, place in enumerate(placement.plan.learner):
        assert place.node is not None, "a plan names every node"
        places[place.node].append(rank)
    world, device = str(config.learner.world_size), str(config.learner_device)
    with tempfile.TemporaryDirectory(prefix="laminar-ranks-") as folder:
        meeting = await _rendezvous(places, placement, Path(folder))
        calls = [
            on_node(node, run_ranks, meeting, ",".join(map(str, ranks)), world, device)
            for node, ranks in places.items()
        ]
        found = await asyncio.gather(*calls, return_exceptions=True)
    answers = [line for lines in map(_lines, found) for line in lines]
    figures = [one for one in map(measured, answers) if one is not None]
    if len(figures) < config.learner.world_size:
        return [_unmet_row(answers)]
    asked = LOOPBACK if device == "cpu" else NVLINK if len(places) == 1 else NETWORK
    remedy = "NCCL_DEBUG=INFO names the way that it takes" if device == "cuda" else "other load on these cores"
    where = ""
    if len(places) > 1:
        where = f" (between {', '.join(placement.ip(node) for node in places)})"
        remedy = "the link between these nodes; ray start --node-ip-address selects another; NCCL_DEBUG=INFO"
    rates = {
        "all-reduce": min(one.all_reduce for one in figures),
        "reduce-scatter": min(one.reduce_scatter for one in figures),
    }
    rows = (rate_row(what, asked, rate, remedy=remedy) for what, rate in rates.items())
    return [replace(row, measured=f"{row.measured}{where}") for row in rows]


async def _rendezvous(places: Mapping[str, list[int]], placement: Placement, folder: Path) -> str:
    if len(places) == 1:
        return str(folder / "ranks")
    first = next(node for node, ranks in places.items() if 0 in ranks)
    ip = placement.ip(first)
    port = decode(int, await on_node(first, free_port, ip))
    return f"tcp://{ip}:{port}"


def _lines(found: bytes | BaseException) -> list[str]:
    return (
        [f"a node did not run its ranks: {found}"]
        if isinstance(found, BaseException)
        else decode(list[str], found)
    )


def _unmet_row(answers: Sequence[str]) -> TriedRow:
    """Return a failed row; ranks that wait for others are named only if there is no other line."""
    lines = [line for line in answers if measured(line) is None]
    culprits = [line for line in lines if "waits for the other ranks" not in line] or lines
    remedy = "the firewall between nodes, ray start --node-ip-address, NCCL_DEBUG=INFO"
    return judged("all-reduce", "all ranks join", "; ".join(culprits[:2]), failed=True, remedy=remedy)
