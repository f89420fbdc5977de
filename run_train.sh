#!/usr/bin/env bash
# Train: on this machine, on several nodes, or as a Slurm step; without editing this file.
#
#   ./run_train.sh                                             the embedded debug job
#   NGPU=4 ./run_train.sh --config NAME --training.steps 100   another job, with a changed key
#   ./run_train.sh --help                                      every key of the configuration
#
# NGPU           processes on this node: default the visible GPUs, else 2 CPU processes
# LOG_RANK       ranks whose output is shown here (default 0); the others' goes to dump_folder/logs
# CONFIG_FILE    like --config and --job.config_file: a path, or a name in train_configs/
# NNODES, RDZV_ENDPOINT (host:port), RDZV_ID, RDZV_BACKEND, NODE_RANK
#                several nodes: start this script once on each. Under Slurm all are filled in:
#                srun --nodes=2 --ntasks-per-node=1 ./run_train.sh ...
# PYTHON         the interpreter, instead of what scripts/env chooses
# Everything else is passed on as --section.key value.
set -euo pipefail

root="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"

fail() {
    echo "run_train.sh: $*" >&2
    exit 2
}

# GPUs that a process started here would see. Asks the driver, not torch, which needs seconds.
visible_gpus() {
    local present device count=0 listed
    # A broken driver's message is no GPU; a container may hold the devices without nvidia-smi.
    present="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)"
    if ((present == 0)); then present="$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' | wc -l)"; fi
    if [[ -z "${CUDA_VISIBLE_DEVICES+set}" ]]; then
        echo "$present"
        return
    fi
    IFS=, read -ra listed <<<"$CUDA_VISIBLE_DEVICES"
    for device in "${listed[@]}"; do
        if [[ "$device" == -* ]]; then break; fi # CUDA ignores what follows an invalid entry
        count=$((count + 1))
    done
    echo $((count < present ? count : present))
}

# The first host of a Slurm node list such as "gpu[003-006,9],login1".
first_slurm_host() {
    local hosts list="$1" host="" group
    if hosts="$(scontrol show hostnames "$list" 2>/dev/null)" && [[ -n "$hosts" ]]; then
        echo "${hosts%%$'\n'*}"
        return
    fi
    while [[ "$list" =~ ^([^][,]*)\[([^]]*)\](.*)$ ]]; do # text[first-last,...]rest
        group="${BASH_REMATCH[2]%%[,-]*}"
        host+="${BASH_REMATCH[1]}$group"
        list="${BASH_REMATCH[3]}"
    done
    echo "$host${list%%,*}"
}

# Sets nnodes, endpoint, rdzv_id and node_rank from NNODES and RDZV_*, else Slurm, else one node.
find_nodes() {
    local slurm_nodes="${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-1}}"
    local slurm_hosts="${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}"
    nnodes="${NNODES:-$slurm_nodes}"
    endpoint="${RDZV_ENDPOINT:-}" rdzv_id="${RDZV_ID:-${SLURM_JOB_ID:-torchtitan_lc}}"
    node_rank="${NODE_RANK:-}"
    [[ "$nnodes" =~ ^[1-9][0-9]*$ ]] || fail "NNODES=$nnodes is not a number of nodes"
    if ((${SLURM_STEP_NUM_TASKS:-1} > slurm_nodes)); then
        fail "Slurm started ${SLURM_STEP_NUM_TASKS} tasks on $slurm_nodes node(s); start one task" \
            "per node (--ntasks-per-node=1): it starts the processes of all the node's GPUs"
    fi
    if ((nnodes == 1)); then
        endpoint="${endpoint:-localhost:0}"
    elif [[ -z "$endpoint" ]]; then
        [[ -n "$slurm_hosts" ]] || fail "NNODES=$nnodes needs RDZV_ENDPOINT=host:port," \
            "the same on every node (host: one of the nodes)"
        endpoint="$(first_slurm_host "$slurm_hosts"):29500"
        node_rank="${node_rank:-${SLURM_NODEID:-}}"
    fi
}

names_a_config() { # the script's arguments
    local argument
    if [[ -n "${CONFIG_FILE:-}" ]]; then return; fi
    for argument in "$@"; do
        case "${argument%%=*}" in --config | --job.config_file | --job.config-file) return ;; esac
    done
    return 1
}

find_nodes
ngpu="${NGPU:-}"
if [[ -z "$ngpu" ]]; then
    ngpu="$(visible_gpus)"
    if ((ngpu == 0)); then ngpu=2; fi
fi
[[ "$ngpu" =~ ^[1-9][0-9]*$ ]] || fail "NGPU=$ngpu is not a number of processes"

# shellcheck source=scripts/env
source "$root/scripts/env" ""

# FSDP's shards and gathers of many sizes fragment the allocator unless its segments can grow. It
# is read when CUDA starts, so it has to be set before the processes are.
if [[ -z "${PYTORCH_ALLOC_CONF:-}" && -z "${PYTORCH_CUDA_ALLOC_CONF:-}" ]]; then
    export PYTORCH_ALLOC_CONF=expandable_segments:True
fi
# Otherwise each process starts as many threads as the machine has cores, and they fight.
if [[ -z "${OMP_NUM_THREADS:-}" ]]; then
    cores="$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
    export OMP_NUM_THREADS=$((cores > ngpu ? cores / ngpu : 1))
fi

launch=(
    "$PYTHON" -m torchtitan_lc.launch
    --nproc_per_node "$ngpu" --nnodes "$nnodes" --log_rank "${LOG_RANK:-0}"
    --rdzv_backend "${RDZV_BACKEND:-c10d}" --rdzv_endpoint "$endpoint" --rdzv_id "$rdzv_id"
)
if [[ -n "$node_rank" ]]; then launch+=(--node_rank "$node_rank"); fi
if ! names_a_config "$@"; then
    debug_job=(--config "$root/train_configs/debug.toml")
    # The debug job is laid out for two ranks or more; a lone GPU runs it too. Later flags win.
    if ((ngpu * nnodes == 1)); then debug_job+=(--parallelism.context_parallel_degree 1); fi
    set -- "${debug_job[@]}" "$@"
fi
exec "${launch[@]}" -- "$@"
