#!/bin/bash
# An experiment on nodes of Slurm: sbatch --nodes=4 configs/launch/slurm.sh experiments/sweep
# Submit it in the project's folder, on a file system that all nodes share, with `laminar` in PATH. On more than one
# node the experiment sets `cluster.address: auto`. Ten minutes before the time limit runs stop with a checkpoint,
# and the job is queued again; the same command then continues.
#SBATCH --job-name=laminar
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
set -euo pipefail
experiment=$1
port=6379

until_ray() { # waits for a condition, ten minutes at most, or until a `ray start` has ended; both end the job
    local latest=$((SECONDS + 600))
    until "$@"; do
        ((SECONDS < latest)) || { echo "Ray is not up on all nodes after ten minutes" >&2 && exit 1; }
        for pid in "${rays[@]}"; do
            kill -0 "$pid" 2> /dev/null || { echo "a ray start has ended; see above" >&2 && exit 1; }
        done
        sleep 2
    done
}
is_up() { ray status --address="$head:$port" > /dev/null 2>&1; }
are_all_up() { (($(ray status --address="$head:$port" 2> /dev/null | grep -c '^ *1 node_') >= SLURM_NNODES)); }

if ((SLURM_NNODES > 1)); then
    RAY_AUTH_TOKEN=$(openssl rand -hex 32)
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    others=$((SLURM_NNODES - 1))
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" ray start --head --port=$port --block &
    rays=($!)
    until_ray is_up
    srun --overlap --nodes=$others --ntasks=$others --kill-on-bad-exit=0 --exclude="$head" \
        ray start --address="$head:$port" --block &
    rays+=($!)
    until_ray are_all_up
fi

laminar launch "$experiment" &
launcher=$!
trap 'kill -TERM $launcher' TERM
code=0
wait $launcher || code=$?
trap '' TERM
if ((code == 143)); then # the signal ended `wait`, and runs are writing their checkpoints
    code=0
    wait $launcher || code=$?
fi
# 143: the signal came before there were runs
if ((code == 130 || code == 143)); then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
