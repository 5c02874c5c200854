#!/usr/bin/env bash
# Sets everything up, then trains a tiny model stock, then patched, and compares the runs. Flags go to `fastpack demo`.
set -euo pipefail
# shellcheck source=gists/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

prepare trl,plot
fastpack demo "$@"
