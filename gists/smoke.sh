#!/usr/bin/env bash
# Builds many architectures tiny, patches them, proves each exact, and trains three steps with TRL: whole, with LoRA and
# packed, with each attention backend that this machine has. Prints a table; exits with 1 if any row failed.
#
#   bash gists/smoke.sh                the families that people use most
#   bash gists/smoke.sh llama bamba    some
#   bash gists/smoke.sh --all          every causal LM of transformers
#   bash gists/smoke.sh --help         modes, backends, processes, time limit
set -euo pipefail
# shellcheck source=gists/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

prepare trl
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" exec python -m fastpack.smoke "$@"
