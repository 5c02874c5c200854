#!/usr/bin/env bash
# Sets everything up, then runs the whole test suite.
#
#   bash gists/test.sh            lint, types, and the pairwise cover
#   bash gists/test.sh --all      the full product, and frameworks that install beside fastpack
#   bash gists/test.sh -k packing -x    any flag of pytest
set -euo pipefail
# shellcheck source=gists/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

extras=test
workers=(-n 2)
for flag in "$@"; do
    case "$flag" in
    --all) extras=test,frameworks ;;
    -n* | --numprocesses* | --pdb) workers=() ;;
    esac
done
prepare "$extras"

ruff check --quiet
ruff format --check --quiet
mypy
lint-imports --no-logo --no-cache
# one thread a worker: threads of several processes that wait for each other make everything many times slower
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" python -m pytest ${workers[@]+"${workers[@]}"} "$@"
