"""What `laminar relay plan` shows, and what it refuses."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.config.section import ConfigError
from laminar_py.relay.plan import RelayPlan, TreeSpec, make_relay_plan, plan_lines, read_spec

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "relay").glob("*.yaml"))
FILE = "hosts: 8\nlink_gbit_per_s: 100\nparameters: 7B\nshm_gib: 256\n"


def spec_of(folder: Path, *overrides: str, text: str = FILE) -> TreeSpec:
    path = folder / "tree.yaml"
    path.write_text(text)
    return read_spec(path, list(overrides))


def plan_of(folder: Path, *overrides: str, text: str = FILE) -> RelayPlan:
    return make_relay_plan(spec_of(folder, *overrides, text=text))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_example_is_planned_and_told(path: Path) -> None:
    plan = make_relay_plan(read_spec(path, []))
    lines = plan_lines(plan)
    assert plan.full_s > 0
    assert any(line.startswith("shared memory") for line in lines)


def test_there_are_examples() -> None:
    assert {path.stem for path in CONFIGS} == {"rack", "racks_128", "two_sites"}


@pytest.mark.parametrize(
    ("text", "parameters"),
    [("7B", 7 * 10**9), ("0.5b", 5 * 10**8), ("25M", 25 * 10**6), ("1000", 1000), ("1T", 10**12)],
)
def test_sizes_are_read_as_people_write_them(tmp_path: Path, text: str, parameters: int) -> None:
    assert spec_of(tmp_path, f"parameters={text}").full.num_bytes == 2 * parameters


def test_units_become_bytes_and_seconds(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "hosts=null", "zones={a: 3, b: 2}", "zone_gbit_per_s=8", "overhead_us=50")
    assert (spec.links.bytes_per_s, spec.links.zone_bytes_per_s) == (12.5e9, 1e9)
    assert spec.links.overhead_s == pytest.approx(5e-5)
    assert spec.labels == ("a", "a", "a", "b", "b")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nonsense=3", r"nonsense=3: unknown key; configs/relay lists all"),
        ("hosts=0", r"hosts=0: input should be greater"),
        ("topology=ring", r"topology='ring': input should be"),
        ("parameters=seven B", r"parameters='seven B': write a number and K, M, B or T"),
        ("parameters=-7B", r"parameters=-7000000000: input should be greater"),
        ("parameters=infB", r"parameters='infB': write a number"),
        ("link_gbit_per_s=fast", r"link_gbit_per_s='fast': input should be a valid number"),
        ("chunk_bytes=5000", r"chunk_bytes=5000: input should be a multiple of 4096"),
        ("zones={a: 4, b: 4}", r"hosts=8: the zones have 8; leave one"),
        ("hosts=null", r"hosts: missing; say how many"),
        ("zone_gbit_per_s=10", r"zone_gbit_per_s=10: there is only one zone"),
        ("delta_share=2", r"delta_share=2: input should be less"),
        ("hosts", r"override=hosts: not of the form key=value"),
        ("zones=[", r"override=zones=\[: its value is not YAML"),
    ],
)
def test_bad_values_are_one_line_that_names_field_and_value(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        spec_of(tmp_path, override)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no settings"),
        ("- 1", "holds no settings"),
        ("a: [", "not YAML"),
        ("hosts: 8", "missing; add it"),
    ],
)
def test_a_file_that_is_no_spec_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(tmp_path, text=text)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_spec(tmp_path / "none.yaml", [])


def test_memory_at_the_peak_is_kept_arriving_fetched_and_held_versions(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "keep_versions=3", "replicas_per_host=2")
    assert plan.peak_bytes == (3 + 1 + 1 + 2) * 14 * 10**9


@settings(deadline=None)
@given(keep=st.integers(1, 6), replicas=st.integers(0, 8), shm_gib=st.integers(1, 200))
def test_what_does_not_fit_is_refused_with_a_remedy_that_fits(keep: int, replicas: int, shm_gib: int) -> None:
    def fitted(**changes: int) -> TreeSpec:
        chosen = {"keep_versions": keep, "replicas_per_host": replicas, "shm_gib": shm_gib} | changes
        return TreeSpec(hosts=4, link_gbit_per_s=100, parameters="7B", **chosen)

    if fitted().full.num_bytes * (keep + 2 + replicas) <= shm_gib * 2**30:
        make_relay_plan(fitted())
        return
    with pytest.raises(ConfigError, match=rf"shm_gib={shm_gib}: .* set it to") as refused:
        make_relay_plan(fitted())
    needed = re.search(r"set it to (\d+)(?:, or keep_versions to (\d+))?$", str(refused.value))
    assert needed is not None
    make_relay_plan(fitted(shm_gib=int(needed[1])))
    if needed[2] is not None:
        make_relay_plan(fitted(keep_versions=int(needed[2])))


def test_a_chunk_size_that_is_set_is_kept_and_no_faster(tmp_path: Path) -> None:
    best, chosen = plan_of(tmp_path, "topology=chain"), plan_of(tmp_path, "topology=chain", "chunk_bytes=4096")
    assert chosen.chunk_bytes == 4096
    assert chosen.full_s > best.full_s


def test_a_delta_over_a_slow_network_is_faster_and_can_be_left_out(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "link_gbit_per_s=1")
    assert plan.delta_s is not None
    assert plan.delta_s < plan.full_s / 10
    assert plan_of(tmp_path, "delta_share=null").delta_s is None


def test_one_host_needs_no_network(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "hosts=1")
    assert (plan.full_s, plan.depth) == (0, 0)
