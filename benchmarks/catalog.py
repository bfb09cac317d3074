"""Rows that `python -m benchmarks` prints, by benchmark and by the part of it that `--only` names.

As `laminar_py.bench.catalog`, which has what a user measures: a row stands in one of both, once.
"""

from laminar_py.bench.catalog import Catalog

ROWS: Catalog = {
    "relay": {
        "sockets": "hop_over_socket hop_curve_over_socket ipc_hop_over_socket socket_GBps unix_socket_GBps",
        "fanout": "ray_over_ours gloo_over_ours http_over_ours",
        "hosts": "W star_over_bound chain_over_bound kary2_over_bound auto_over_bound recovery_over_undisturbed"
        " gloo_8hosts_over_ours http_8hosts_over_ours",
    },
    "engine": {
        "huggingface": "local_over_hf_c1 hf_useful_tokens_c1 local_over_hf_c8 hf_useful_tokens_c8"
        " local_over_hf_c32 hf_useful_tokens_c32"
    },
    "learner": {
        "gradients": "packed_vs_single_grad",
        "agreement": "engine_mismatch_max mask_replay_ratio_error mask_replay_ratio_error_without",
        "routing": "router_replay_ratio_error router_replay_ratio_error_without",
        "padded": "packed_over_padded packed_over_sorted",
        "memory": "logprob_memory_over_naive",
    },
    "repack": {
        "workload": "throughput_repack_over_off throughput_paper_over_off throughput_full_over_off gain_of_ceiling"
        " ours_over_paper_planner latency_p95_over_off round_s round_paper_s release_s kv_use_off kv_use_paper"
        " kv_use_repack kv_use_full",
        "schedules": "sync_tokens_per_s sync_generation_share sync_disaggregated_over_sync one_step_over_sync"
        " async_over_sync async_repack_over_sync async_full_over_sync async_repack_of_ceiling"
        " sync_tokens_per_s_20x sync_generation_share_20x sync_disaggregated_over_sync_20x one_step_over_sync_20x"
        " async_over_sync_20x async_repack_over_sync_20x async_full_over_sync_20x async_repack_of_ceiling_20x",
    },
}
