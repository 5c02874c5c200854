#!/usr/bin/env bash
# Sets everything up, then runs the lint and type checks and the test suite.
#
#   bash gists/test.sh            in ten minutes on two cores: a sample of long parametrizations, without slow tests
#   bash gists/test.sh --all      every parametrization, slow tests, and the other frameworks
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
# one thread a worker: with more, threads wait for those of other processes, and all tests get many times slower
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" python -m pytest ${workers[@]+"${workers[@]}"} "$@"
