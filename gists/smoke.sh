#!/usr/bin/env bash
# Builds many architectures tiny, patches them, and proves each exact: logits and every gradient of every kind of input
# against each sequence alone. Then trains three steps with TRL: whole, with LoRA and packed, with each attention backend
# that this machine has. Prints a table, and the refused families with reasons; exits with 1 if any row failed. On a
# GPU: bfloat16 and real head sizes. Every family has its own process, with a time limit.
#
#   bash gists/smoke.sh                the families that people use most: three to six minutes on two cores
#   bash gists/smoke.sh llama bamba    these families
#   bash gists/smoke.sh --all          every causal LM of transformers: eight to twelve minutes
#   bash gists/smoke.sh --all --modes exact --backends auto     only the proof: two to three minutes
#   bash gists/smoke.sh --all --tier fast --modes verify --backends auto --dtype bfloat16     in half precision, on a CPU
#   bash gists/smoke.sh --help         modes, backends, processes, time limit, device, precision
#
# To print what a run proved, and to enter it in the lock file of sources:
#   bash gists/smoke.sh --all --json run.json && fastpack families --from run.json [--lock]
set -euo pipefail
# shellcheck source=gists/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

prepare trl
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" exec python -m fastpack smoke "$@"
