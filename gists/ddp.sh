#!/usr/bin/env bash
# Starts `fastpack sft` or `fastpack dpo` on many GPUs, one process each: with DDP, or with FSDP2 if the weights or the
# optimiser's state don't fit on one GPU. Flags after -- go to `fastpack sft` or `fastpack dpo`. Without a GPU the
# processes share the CPU and communicate over gloo.
#
#   bash gists/ddp.sh                                        a tiny example: two processes give the same losses as one
#   bash gists/ddp.sh -- sft --model_name_or_path MODEL --dataset_name DATA      DDP, on all GPUs
#   bash gists/ddp.sh 4 --fsdp -- dpo --model_name_or_path MODEL --dataset_name PAIRS     FSDP2, on four of them
set -euo pipefail
# shellcheck source=gists/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

fail() {
    echo "$1" >&2
    exit 2
}

# start COUNT WRAP COMMAND FLAG...: `fastpack COMMAND` with these flags in COUNT processes
start() {
    local count="$1" wrap="$2" command="$3"
    shift 3
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # each process has its own GPU, or a share of the CPU
    if [[ "$wrap" == fsdp ]]; then
        accelerate launch --num_processes "$count" --num_machines 1 --main_process_port 0 --dynamo_backend no \
            --mixed_precision no --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \
            --fsdp_reshard_after_forward true --fsdp_cpu_ram_efficient_loading false \
            --fsdp_state_dict_type FULL_STATE_DICT --module fastpack "$command" "$@"
        return
    fi
    torchrun --nproc-per-node "$count" --rdzv-backend c10d --rdzv-endpoint localhost:0 -m fastpack "$command" "$@"
}

# example COUNT: train eight rows a step in one process, then split over COUNT processes
example() {
    local count="$1" folder processes
    ((8 % count == 0)) || fail "the example splits 8 rows over 2, 4 or 8 processes, not over $count"
    folder="$(mktemp -d)"
    # shellcheck disable=SC2064
    trap "rm -rf '$folder'" EXIT
    python - "$folder" <<'PYTHON'
import sys
from pathlib import Path

from fastpack.cli.demo.data import make_rows, tiny_llama, train_tokenizer, write_rows

folder, rows = Path(sys.argv[1]), make_rows(64)
tokenizer = train_tokenizer(rows)
tokenizer.save_pretrained(folder / "tokenizer")
write_rows(rows, folder)
(folder / "llama.json").write_text(tiny_llama(tokenizer).to_json_string())
PYTHON
    for processes in 1 "$count"; do
        start "$processes" ddp sft --random_init "$folder/llama.json" --tokenizer "$folder/tokenizer" \
            --dataset_name "$folder/rows.jsonl" --max_steps 4 --per_device_train_batch_size $((8 / processes)) \
            --learning_rate 1e-3 --bf16 False --save_strategy no --disable_tqdm True --output_dir "$folder/out" \
            --json "$folder/$processes.json"
    done
    python - "$folder" "$count" <<'PYTHON'
import json
import sys
from pathlib import Path

folder, count = Path(sys.argv[1]), sys.argv[2]
one, many = (
    [step["loss"] for step in json.loads((folder / f"{n}.json").read_text())["steps"]] for n in ("1", count)
)
print("step   1 process   " + f"{count} processes")
for step, (a, b) in enumerate(zip(one, many, strict=True), 1):
    print(f"{step:4}   {a:9.6f}   {b:11.6f}")
apart = max(abs(a - b) / abs(a) for a, b in zip(one, many, strict=True))
same = len(one) == 4 and apart <= 1e-5
print(f"the losses are {'the same' if same else 'NOT the same'} as in one process: at most {apart:.0e} apart, relative")
sys.exit(not same)
PYTHON
}

count="" wrap=ddp
while (($#)) && [[ "$1" != "--" ]]; do
    case "$1" in
    --fsdp) wrap=fsdp ;;
    -h | --help)
        sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit
        ;;
    *)
        [[ "$1" =~ ^[1-9][0-9]*$ ]] || fail "pass [N] [--fsdp] [-- sft|dpo FLAG...], not '$1'"
        count="$1"
        ;;
    esac
    shift
done
(($# == 0)) || shift

case "${1:-}" in
sft | dpo | "") ;;
*) fail "after --, pass sft or dpo and its flags, not '$1'" ;;
esac

prepare trl
gpus="$(python -c 'import torch; print(torch.cuda.device_count())')"
if ((gpus == 0)) && [[ "$wrap" == fsdp ]]; then
    fail "--fsdp needs GPUs: accelerate does not shard models on a CPU (it silently uses DDP there)"
fi
if ((gpus > 0 && ${count:-0} > gpus)); then
    fail "$count processes need $count GPUs, but there are $gpus"
fi
if (($# == 0)); then
    [[ "$wrap" == ddp ]] || fail "the example uses DDP; with --fsdp, pass sft or dpo and its flags after --"
    example "${count:-2}"
else
    start "${count:-$((gpus > 0 ? gpus : 2))}" "$wrap" "$@"
fi
