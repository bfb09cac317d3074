"""Rows that `laminar bench` prints, by benchmark and by the part of it that `--only` names.

Read by the command line and by the test of docs/performance.md. Invariant: a row stands here once, or once in
`benchmarks.catalog`, which has what needs a laboratory; importing a catalog imports no heavy library.
"""

from laminar_py.config.section import ConfigError

Catalog = dict[str, dict[str, str]]  # benchmark -> part -> names of its rows, with spaces between

ROWS: Catalog = {
    "relay": {
        "hop": "hop_GBps hop_curve_GBps ipc_hop_GBps",
        "publish": "stall_over_memcpy",
        "delta": "delta_bytes_1e6 delta_bytes_3e6 delta_encode_GBps delta_apply_GBps",
    },
    "engine": {
        "local": "local_useful_tokens_c1 local_useful_tokens_c8 local_useful_tokens_c32",
        "sglang": "client_over_bare_http refresh_in_place_s refresh_in_place_over_bare refresh_drain_s"
        " refresh_resume_s refresh_retract_s refresh_retract_over_bare",
    },
    "learner": {
        "speed": "packed_tokens_per_s",
        "lora": "lora_bytes_over_full lora_refresh_over_full",
        "mfu": "mfu",
    },
    "repack": {"plan": "plan_256x8192_ms"},
    "packer": {
        "step": "fill capacity_used imbalance pack_2048_ms",
        "random": "cap_violations",
        "stream": "stream_fill stream_imbalance stream_us stream_add_us stream_send_us ready_ms",
        "look_ahead": "look_ahead_0_capacity_used look_ahead_4_capacity_used look_ahead_8_capacity_used"
        " look_ahead_16_capacity_used",
        "prefix": "prefix_400_1500_tokens prefix_400_1500_flops prefix_2000_500_tokens prefix_2000_500_flops",
    },
    "ledger": {
        "recording": "accounting accounting_cpu append_cpu writer_cpu archive_cpu accounting_while_read"
        " read_while_written",
        "disk": "ledger_bytes archive_bytes",
        "verify": "verify verify_cpu verify_memory",
        "show": "show_p50 show_max show_command",
    },
}


def choose(catalog: Catalog, bench: str, only: str | None) -> tuple[str, ...]:
    """Parts of a benchmark to run: all, or the named one. Raises `ConfigError` where there is no such part."""
    parts = tuple(catalog[bench])
    if only is None:
        return parts
    if only not in parts:
        raise ConfigError(f"--only {only}: no such part of {bench}; choose {' or '.join(parts)}")
    return (only,)


def row_names(catalog: Catalog, bench: str, *parts: str) -> list[str]:
    """Names of the rows of these parts of a benchmark, or of all its parts."""
    return [name for part in parts or catalog[bench] for name in catalog[bench][part].split()]
