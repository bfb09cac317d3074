"""`laminar bench`: measure a part of the system on this machine."""

from typing import Annotated

import typer

from laminar_lab.bench.catalog import SHM, Benchmark, Catalog, Measurement, add_commands, option, repeats

BENCHMARKS: Catalog = {
    "relay": Benchmark(
        help="Hops between processes, stall of a publish, bytes and speed of deltas. Takes minutes.",
        example="--only hop --json",
        options=[repeats(7), SHM],
        measurements={
            "hop": Measurement("laminar_lab.bench.relay.hop:rows", "hop_GBps hop_curve_GBps ipc_hop_GBps"),
            "publish": Measurement(
                "laminar_lab.bench.relay.steps:stall_rows", "stall_with_cast_over_memcpy stall_over_memcpy"
            ),
            "delta": Measurement(
                "laminar_lab.bench.relay.steps:delta_rows",
                "delta_bytes_1e6 delta_bytes_3e6 delta_encode_GBps delta_apply_GBps",
            ),
        },
    ),
    "engine": Benchmark(
        help="Rate of the embedded engine; SGLang's client and refreshes. Rounds come on stderr. Takes minutes.",
        example="--only local --repeats 5 --json",
        options=[repeats(3)],
        measurements={
            "local": Measurement(
                "laminar_lab.bench.engines.local:rows",
                "local_useful_tokens_c1 local_useful_tokens_c8 local_useful_tokens_c32",
            ),
            "sglang": Measurement(
                "laminar_lab.bench.engines.sglang:rows",
                "client_over_bare_http client_cpu_us_per_token refresh_in_place_s refresh_in_place_over_bare"
                " refresh_drain_s refresh_resume_s refresh_retract_s refresh_retract_over_bare",
            ),
        },
    ),
    "learner": Benchmark(
        help="Speed on packed sequences, refreshes with adapters, use of a GPU. Takes minutes.",
        example="--only speed --json",
        measurements={
            "speed": Measurement("laminar_lab.bench.learner.speed:rows", "packed_tokens_per_s"),
            "lora": Measurement(
                "laminar_lab.bench.learner.lora:rows", "lora_bytes_over_full lora_refresh_over_full"
            ),
            "mfu": Measurement("laminar_lab.bench.learner.mfu:rows", "mfu"),
        },
    ),
    "repack": Benchmark(
        help="Time to plan a round, and what repacking gains on a simulated fleet.\n\n"
        "The plan takes seconds, each model a quarter of an hour of one core.",
        example="--only plan --json",
        options=[
            option("seeds", Annotated[int, typer.Option(min=1, help="Simulated runs of each figure, a median")], 3)
        ],
        measurements={
            "plan": Measurement("laminar_lab.bench.repack:rows", "plan_256x8192_ms"),
            "7b": Measurement(
                "laminar_lab.bench.repacked_fleet:rows_7b",
                "throughput_repack_over_off_7b throughput_paper_over_off_7b throughput_full_over_off_7b"
                " gain_of_ceiling_7b ours_over_paper_planner_7b latency_p95_over_off_7b"
                " async_repack_of_ceiling_7b",
            ),
            "32b": Measurement(
                "laminar_lab.bench.repacked_fleet:rows_32b",
                "throughput_repack_over_off_32b throughput_paper_over_off_32b throughput_full_over_off_32b"
                " gain_of_ceiling_32b ours_over_paper_planner_32b latency_p95_over_off_32b"
                " async_repack_of_ceiling_32b",
            ),
        },
    ),
    "plan": Benchmark(
        help="Runs predicted and then seen; what the first choice of a plan lacks. Takes hours.",
        example="--only quickstart --runs 1 --json",
        options=[
            option(
                "runs", Annotated[int, typer.Option(min=1, help="Rounds of each figure; figures are medians")], 3
            ),
            option("cases", Annotated[int, typer.Option(min=1, help="Random fleets that are planned")], 20),
        ],
        measurements={
            "quickstart": Measurement(
                "laminar_lab.bench.plan.quickstart:rows",
                "plan_error_median plan_within plan_sync plan_one_step plan_one_replica plan_sync_one_replica"
                " plan_half_batch plan_double_batch plan_stale_0 plan_slow_reward",
            ),
            "fleets": Measurement(
                "laminar_lab.bench.plan.fleets:rows",
                "plan_fleet_error_median plan_fleet_error_max plan_fleet_kv_error_max"
                " plan_fleet_staleness_error_max plan_fleet_async plan_fleet_async_repack plan_fleet_async_paper"
                " plan_fleet_in_place plan_fleet_one_step plan_fleet_sync plan_fleet_published",
            ),
            "regret": Measurement("laminar_lab.bench.plan.regret:rows", "plan_regret_p95"),
        },
    ),
    "packer": Benchmark(
        help="Fill, balance over ranks and cost of packing finished trajectories. Takes about a minute.",
        example="--json",
        measurements={
            "step": Measurement("laminar_lab.bench.packer:step_rows", "fill capacity_used imbalance pack_2048_ms"),
            "random": Measurement("laminar_lab.bench.packer:random_rows", "cap_violations"),
            "stream": Measurement(
                "laminar_lab.bench.packer:stream_rows",
                "stream_fill stream_imbalance stream_us stream_add_us stream_send_us ready_ms",
            ),
            "look_ahead": Measurement(
                "laminar_lab.bench.packer:look_ahead_rows",
                "look_ahead_0_capacity_used look_ahead_4_capacity_used look_ahead_8_capacity_used"
                " look_ahead_16_capacity_used",
            ),
            "prefix": Measurement(
                "laminar_lab.bench.packer:prefix_rows",
                "prefix_400_1500_tokens prefix_400_1500_flops prefix_2000_500_tokens prefix_2000_500_flops",
            ),
        },
    ),
    "reward": Benchmark(
        help="Programs a second in a sandbox, verifications a second beside some that hang. Takes minutes.",
        example="--only sandbox --json",
        options=[
            option(
                "programs", Annotated[int, typer.Option(min=5, help="Number to run in the strongest tier")], 10_000
            ),
            option("verifications", Annotated[int, typer.Option(min=2, help="One in a hundred hangs")], 10_000),
        ],
        measurements={
            "sandbox": Measurement(
                "laminar_lab.bench.reward.sandbox:strongest_rows", "sandbox_runs_per_s sandbox_warm_ms"
            ),
            "sandbox_landlock": Measurement(
                "laminar_lab.bench.reward.sandbox:landlock_rows", "sandbox_runs_per_s_landlock"
            ),
            "sandbox_none": Measurement("laminar_lab.bench.reward.sandbox:none_rows", "sandbox_runs_per_s_none"),
            "math": Measurement(
                "laminar_lab.bench.reward.mathematics:rows", "math_verifications_per_s math_p95_ms"
            ),
        },
    ),
    "turns": Benchmark(
        help="Time added between an environment's answer and the next turn's first token. Takes a minute.",
        example="--repeats 5 --json",
        options=[repeats(5)],
        measurements={
            "added": Measurement(
                "laminar_lab.bench.environment.measure:rows",
                "turn_added_ms turn_total_ms turn_engine_ms turn_2000_kept_ms turn_2000_computed_ms",
            ),
        },
    ),
    "endpoint": Benchmark(
        help="What agents get through their endpoint, over the engine's own stream. Takes minutes.",
        example="--repeats 5 --json",
        options=[repeats(5)],
        measurements={
            "agents": Measurement(
                "laminar_lab.bench.endpoint.measure:rows",
                "endpoint_over_engine endpoint_over_engine_stream endpoint_over_engine_whole"
                " endpoint_stream_tokens_per_s engine_stream_tokens_per_s endpoint_whole_tokens_per_s"
                " engine_whole_tokens_per_s endpoint_added_ms endpoint_added_p95_ms endpoint_added_many_ms",
            ),
        },
    ),
    "segments": Benchmark(
        help="Pieces of responses written beside a plain file, and fetched beside a bare socket. Takes a minute.",
        example="--only fetch --json",
        options=[repeats(15)],
        measurements={
            "write": Measurement(
                "laminar_lab.bench.segments:write_rows",
                "segment_write_MBps segment_write_over_file segment_write_over_digested_file"
                " segment_write_over_file_3000x1 segment_write_over_file_16000x16 segment_write_over_file_16000x1",
            ),
            "fetch": Measurement(
                "laminar_lab.bench.segments:fetch_rows",
                "segment_fetch_MBps segment_fetch_over_socket segment_fetch_over_socket_3000x1"
                " segment_fetch_over_socket_3000x16 segment_fetch_over_socket_16000x16"
                " segment_fetch_over_socket_16000x256",
            ),
        },
    ),
    "control": Benchmark(
        help="A controller under the load of a large fleet of emulated replicas. Takes five minutes.",
        example="--json",
        options=[
            option("replicas", Annotated[int, typer.Option(min=1, help="Replicas that report")], 1024),
            option("rate", Annotated[float, typer.Option(min=1.0, help="Trajectories a second")], 960.0),
            option("steps", Annotated[int, typer.Option(min=20, help="Steps; the first ten do not count")], 110),
        ],
        measurements={
            "fleet": Measurement(
                "laminar_lab.bench.control.measure:rows",
                "control_trajectories_per_s control_live_trajectories controller_cores_1024 loop_delay_p99_ms"
                " controller_bytes record_age_max_s",
            )
        },
    ),
    "ledger": Benchmark(
        help="Cost of recording, size on disk, and cost of reading it back. Takes about a minute.",
        example="--trajectories 1000000 --json",
        options=[
            option(
                "trajectories",
                Annotated[int, typer.Option(min=1, help="Number to record; 4 kB of disk each")],
                100_000,
            )
        ],
        measurements={
            "recording": Measurement(
                "laminar_lab.bench.ledger.measure:rows",
                "accounting accounting_cpu append_cpu writer_cpu archive_cpu accounting_while_read"
                " read_while_written ledger_bytes archive_bytes verify verify_cpu verify_memory"
                " show_p50 show_max show_command",
            )
        },
    ),
}

bench = typer.Typer(
    help="Measure a part on this machine. `python -m benchmarks` has what needs a laboratory.",
    no_args_is_help=True,
)
add_commands(bench, BENCHMARKS, program="laminar bench")
