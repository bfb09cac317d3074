"""`python -m benchmarks`, in the project's folder: what needs a laboratory, as `laminar bench` has what does not.

Exit codes as of `laminar`: 2 and one line on standard error for bad input.
"""

from typing import Annotated

import typer

from laminar_lab.bench.catalog import SHM, Benchmark, Catalog, Measurement, add_commands, option, repeats, tell
from laminar_py.config.section import ConfigError

BENCHMARKS: Catalog = {
    "relay": Benchmark(
        help="The relay beside bare sockets, Ray, gloo and HTTP, on one host and over hosts with narrow links.\n\n"
        "The hosts are network namespaces, which need root and iproute2. Takes minutes.",
        example="--only hosts --json",
        options=[repeats(7), SHM],
        measurements={
            "sockets": Measurement(
                "benchmarks.relay.sockets:rows",
                "hop_over_socket hop_curve_over_socket ipc_hop_over_socket socket_GBps unix_socket_GBps",
            ),
            "fanout": Measurement("benchmarks.relay.fanout:rows", "ray_over_ours gloo_over_ours http_over_ours"),
            "hosts": Measurement(
                "benchmarks.relay.hosts:rows",
                "W star_over_bound chain_over_bound kary2_over_bound auto_over_bound recovery_over_undisturbed"
                " gloo_8hosts_over_ours http_8hosts_over_ours",
            ),
        },
    ),
    "engine": Benchmark(
        help="The embedded engine beside `generate` of Hugging Face transformers. Takes minutes.",
        example="--repeats 5 --json",
        options=[repeats(3)],
        measurements={
            "huggingface": Measurement(
                "benchmarks.engines.huggingface:rows",
                "local_over_hf_c1 hf_useful_tokens_c1 local_over_hf_c8 hf_useful_tokens_c8 local_over_hf_c32"
                " hf_useful_tokens_c32",
            )
        },
    ),
    "learner": Benchmark(
        help="The learner beside both engines, single sequences, padded batches, whole logits. Takes ten minutes.",
        example="--only padded --json",
        measurements={
            "gradients": Measurement("benchmarks.learner.packing:gradient_rows", "packed_vs_single_grad"),
            "agreement": Measurement(
                "benchmarks.learner.agreement:mismatch_rows",
                "engine_mismatch_max mask_replay_ratio_error mask_replay_ratio_error_without",
            ),
            "routing": Measurement(
                "benchmarks.learner.agreement:routing_rows",
                "router_replay_ratio_error router_replay_ratio_error_without",
            ),
            "padded": Measurement(
                "benchmarks.learner.packing:padded_rows", "packed_over_padded packed_over_sorted"
            ),
            "memory": Measurement("benchmarks.learner.memory:rows", "logprob_memory_over_naive"),
        },
    ),
    "repack": Benchmark(
        help="Repacking on 16 emulated replicas, and whole schedules at equal devices.\n\n"
        "The workload takes two minutes a run, four runs a seed; the schedules 20 minutes for each length skew.",
        example="--only workload --json",
        options=[
            option(
                "seeds",
                Annotated[int, typer.Option(min=1, help="Seeds of the workload; figures are medians")],
                3,
            )
        ],
        measurements={
            "workload": Measurement(
                "benchmarks.repack.workload:rows",
                "throughput_repack_over_off throughput_paper_over_off throughput_full_over_off gain_of_ceiling"
                " ours_over_paper_planner latency_p95_over_off round_s round_paper_s release_s kv_use_off"
                " kv_use_paper kv_use_repack kv_use_full",
            ),
            "schedules": Measurement(
                "benchmarks.repack.schedules:rows",
                "sync_tokens_per_s sync_generation_share sync_disaggregated_over_sync one_step_over_sync"
                " async_over_sync async_repack_over_sync async_full_over_sync async_repack_of_ceiling"
                " sync_tokens_per_s_20x sync_generation_share_20x sync_disaggregated_over_sync_20x"
                " one_step_over_sync_20x async_over_sync_20x async_repack_over_sync_20x async_full_over_sync_20x"
                " async_repack_of_ceiling_20x",
            ),
        },
    ),
    "segments": Benchmark(
        help="Pieces of responses fetched from another host beside a bare socket. Takes half a minute.\n\n"
        "The hosts are network namespaces, which need root and iproute2.",
        example="--repeats 15 --json",
        options=[repeats(9)],
        measurements={
            "hosts": Measurement(
                "benchmarks.segments.hosts:rows",
                "segment_hosts_1Gbit_over_socket segment_hosts_1Gbit_MBps segment_hosts_10Gbit_over_socket"
                " segment_hosts_10Gbit_MBps",
            )
        },
    ),
    "reward": Benchmark(
        help="Verdicts of the term `math` beside its library's. Takes ten seconds.",
        example="--json",
        measurements={
            "pairs": Measurement(
                "benchmarks.reward.pairs:rows",
                "math_right_unseen math_mistaken_unseen math_library_right_unseen math_library_mistaken_unseen",
            )
        },
    ),
}

app = typer.Typer(
    name="python -m benchmarks",
    help="Compare parts with what one would use instead, and run whole emulated fleets.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
add_commands(app, BENCHMARKS, program="python -m benchmarks")

if __name__ == "__main__":
    try:
        app()
    except ConfigError as error:
        tell(f"benchmarks: {error}")
        raise SystemExit(2) from None
