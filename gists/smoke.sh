#!/usr/bin/env bash
# Builds tiny models of many architectures, patches them, and proves each exact: the logits and all gradients of every
# kind of input are compared with those of each sequence alone, and image-text models also on rows with images of
# different sizes. Then trains each for three steps with TRL (whole, with LoRA and packed), with each attention backend
# that this machine has. Prints a table, and the refused families with reasons; exits with 1 if any row failed. A GPU uses
# bfloat16 (float32 on images) and real head sizes. Every family has its own process, with a time limit.
#
#   bash gists/smoke.sh                the most used families: three to six minutes on two cores
#   bash gists/smoke.sh llama bamba    these families
#   bash gists/smoke.sh --all          every causal LM and image-text model of transformers: twelve to twenty minutes
#   bash gists/smoke.sh --all --modes exact images --backends auto     only the proof: four to six minutes
#   bash gists/smoke.sh qwen3_vl llava --modes images     these on images alone
#   bash gists/smoke.sh mixtral gpt_oss --modes experts     with LoRA on every stack of experts
#   bash gists/smoke.sh --all --tier fast --modes verify --backends auto --dtype bfloat16     in half precision, on a CPU
#   bash gists/smoke.sh --help         modes, backends, processes, time limit, device, precision
#
# To print what a run proved, and to add the proved classes to the lock file:
#   bash gists/smoke.sh --all --json run.json && fastpack families --from run.json [--lock]
set -euo pipefail
# shellcheck source=gists/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

prepare trl
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" exec python -m fastpack smoke "$@"
