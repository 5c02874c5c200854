#!/usr/bin/env bash
# Builds many architectures tiny, patches them, and proves each exact: logits and every gradient of every kind of input
# against each sequence alone. Then trains three steps with TRL: whole, with LoRA and packed, with each attention backend
# that this machine has. Prints a table and who is refused and why; exits with 1 if any row failed. On a GPU: bfloat16,
# with heads of a real size. Every family has a process of its own, with a time limit.
#
#   bash gists/smoke.sh                the families that people use most: three to six minutes on two cores
#   bash gists/smoke.sh llama bamba    some
#   bash gists/smoke.sh --all          every causal LM of transformers: eight to twelve
#   bash gists/smoke.sh --all --modes exact --backends auto     only the proof: two to three minutes
#   bash gists/smoke.sh --all --tier fast --modes verify --backends auto --dtype bfloat16     in half precision, on a CPU
#   bash gists/smoke.sh --help         modes, backends, processes, time limit, device, precision
#
# The table of families in the README is what one run proved:
#   bash gists/smoke.sh --all --json run.json && fastpack families --from run.json --into README.md
set -euo pipefail
# shellcheck source=gists/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

prepare trl
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" exec python -m fastpack smoke "$@"
