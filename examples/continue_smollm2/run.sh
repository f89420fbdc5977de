#!/usr/bin/env bash
# The whole of this example, from the GGUF file to a text that the exported model writes.
#
#   examples/continue_smollm2/run.sh            as much as this machine can: see below
#
# NGPU       ranks: default the visible GPUs, at most 2, else 2 CPU processes
# OUT        folder for all files (default outputs/smollm2)
# GGUF       the file, instead of that of the installed package
# SEQ_LEN    tokens in a row: default 32K on GPUs, 1K on a CPU, where 32K would take hours
# STEPS      default 300 on GPUs, 3 on a CPU
# DOCUMENTS  held-out documents to evaluate on: default 32 on GPUs, 2 on a CPU
# Everything else is passed on to run_train.sh.
set -euo pipefail

here="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
root="$(dirname "$(dirname "$here")")"
# shellcheck source=../../scripts/env
source "$root/scripts/env" ""

out="${OUT:-outputs/smollm2}"
gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
if ((gpus > 0)); then
    export NGPU="${NGPU:-$((gpus > 2 ? 2 : gpus))}"
    seq_len="${SEQ_LEN:-32K}" steps="${STEPS:-300}" documents="${DOCUMENTS:-32}"
    precision=bfloat16
else
    export NGPU="${NGPU:-2}"
    seq_len="${SEQ_LEN:-1K}" steps="${STEPS:-3}" documents="${DOCUMENTS:-2}"
    precision=float32
fi

"$PYTHON" "$here/make_hf_folder.py" ${GGUF:+--gguf "$GGUF"} "$out/hf"
"$PYTHON" "$here/prepare_text.py" "$out/text"

evaluate() { # name label folder [option ...]
    local name="$1" label="$2" folder="$3"
    results+=("$out/results/$name.json")
    "$PYTHON" "$here/evaluate.py" "$folder" "$out/text/heldout" --seq_len "$seq_len" \
        --documents "$documents" --label "$label" --out "$out/results/$name.json" "${@:4}"
}

# Of [model.rope]; the run reads it from the same file.
theta="$(sed -n 's/^theta = \([0-9_.]*\).*/\1/p' "$here/train.toml")"
results=()
evaluate original "before" "$out/hf"
if [[ "$seq_len" == 32K ]]; then
    evaluate windows "before, 8K at a time" "$out/hf" --window 8K
fi
evaluate new_theta "before, with the new theta" "$out/hf" --theta "$theta"

layout=()
if ((NGPU == 1)); then
    layout=(--attention.strategy local --parallelism.context_parallel_degree 1
        --parallelism.context_parallel_ulysses_degree 1)
fi
"$root/run_train.sh" --config "$here/train.toml" --job.dump_folder "$out/run" \
    --model.hf_assets_path "$out/hf" --training.dataset_path "$out/text/train" \
    --training.seq_len "$seq_len" --training.steps "$steps" \
    --training.mixed_precision_param "$precision" "${layout[@]}" "$@"

evaluate after "after $steps steps" "$out/run/hf/step-$steps"
"$PYTHON" "$here/plot.py" "$out/results/loss_by_position.png" "${results[@]}"
"$PYTHON" "$here/generate.py" "$out/run/hf/step-$steps"
