#!/bin/bash
# An experiment as a job of a Ray cluster that runs: configs/launch/ray_job.sh experiments/sweep
# Call it in the project's folder, which all nodes see under this path. RAY_ADDRESS is the cluster's dashboard,
# RAY_AUTH_TOKEN its token; the experiment sets `cluster.address: auto`. To stop: `ray job stop ID`, after which runs
# have ten minutes for their checkpoints (Ray itself would kill them after 3 s); to continue, or after a failure of the
# head: the same command.
set -euo pipefail
ray job submit --address "${RAY_ADDRESS:-http://127.0.0.1:8265}" --no-wait \
    --runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600"}}' -- \
    bash -c "cd $(printf %q "$PWD") && exec laminar launch $(printf %q "$1")"
