"""The subcommands of ``fastpack``, a module each with ``main(arguments) -> exit code``."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from importlib import metadata

from fastpack.errors import FastpackError


class UsageError(FastpackError):
    """The command can't do what its arguments ask for; the message says why and how to mend it."""


def require(command: str, *packages: str, extra: str) -> None:
    """Raise unless these optional packages are installed.

    Raises:
        UsageError: it names the extra that brings them.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"`fastpack {command}` needs {' and '.join(missing)}, not installed here: pip install 'fastpack[{extra}]'"
        )


CPU_TRL = "1.16"
"""The first TRL whose SFTTrainer runs on a CPU: before it, the loss is a Triton kernel."""


def trl_trains_on_cpu() -> bool:
    """True where the installed TRL can train without a GPU."""
    from packaging.version import Version

    return Version(metadata.version("trl")) >= Version(CPU_TRL)


def require_trl_on_cpu(command: str) -> None:
    """Raise unless the installed TRL can train without a GPU.

    Raises:
        UsageError: it names the version that can.
    """
    if not trl_trains_on_cpu():
        raise UsageError(
            f"`fastpack {command}` on a CPU needs TRL {CPU_TRL} or newer (before, its loss needs a GPU), here is "
            f"{metadata.version('trl')}: pip install -U trl"
        )


def quiet() -> None:
    """Turn off what libraries say to nobody: of kernels that this run doesn't call, of their own defaults."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # TRL sets this by default; transformers 5.23 then warns of it
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning)
