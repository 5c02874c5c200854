# Functions for the other scripts, which source this file. It does nothing by itself.
#
#   prepare EXTRAS   change to the repository, activate its .venv, and install torch, fastpack and these extras.
#
# A second call finds everything in place and is quick. An installed torch that is new enough is kept. Without a .venv,
# the active environment is used if it has everything.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
TORCH="torch==2.13.0" # installed first if missing: a looser requirement may bring gigabytes of CUDA

prepare() {
    cd "$ROOT"
    if [[ ! -f .venv/bin/activate ]]; then
        if satisfied "$1" 2>/dev/null; then
            return
        fi
        make_venv
    fi
    # shellcheck disable=SC1091
    source .venv/bin/activate
    if ! satisfied torch; then
        echo "installing $TORCH (a few minutes the first time)"
        quiet_pip install "$TORCH"
    fi
    if ! satisfied "$1"; then
        echo "installing fastpack with [$1]"
        quiet_pip install -e ".[$1]"
    fi
}

make_venv() {
    local python options=()
    python="$(find_python)"
    # let the .venv use a torch that the system already has, built for its GPU
    if "$python" -c 'import sys, importlib.util as u; sys.exit(sys.prefix != sys.base_prefix or not u.find_spec("torch"))'; then
        options=(--system-site-packages)
    fi
    echo "making .venv with $("$python" --version)"
    "$python" -m venv ${options[@]+"${options[@]}"} .venv
}

find_python() {
    local candidate
    for candidate in python3 python3.11 python3.12 python3.13 python3.14 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "fastpack needs Python 3.11 or newer, and none was found: install one (https://www.python.org/downloads/)," \
        "or make the environment yourself in .venv." >&2
    return 1
}

quiet_pip() {
    python -m pip -qq --disable-pip-version-check --no-input "$@"
}

# satisfied torch | EXTRAS: check that the requirements in pyproject.toml and this folder's fastpack are installed
satisfied() {
    python -I - "$ROOT" "$1" <<'PYTHON'
import sys
import tomllib
from importlib import metadata, util
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

root, wanted = Path(sys.argv[1]), sys.argv[2]
project = tomllib.loads((root / "pyproject.toml").read_text())["project"]


def installed(line):
    requirement = Requirement(line)
    if requirement.name == project["name"]:  # an extra that consists of other extras
        return all(map(installed, of_extras(requirement.extras)))
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def of_extras(names):
    return [line for name in names for line in project["optional-dependencies"][name]]


if wanted == "torch":
    sys.exit(not all(installed(line) for line in project["dependencies"] if Requirement(line).name == "torch"))
spec = util.find_spec("fastpack")
here = spec is not None and spec.origin is not None and Path(spec.origin).parent.parent == root
sys.exit(not (here and all(map(installed, [*project["dependencies"], *of_extras(wanted.split(","))]))))
PYTHON
}
