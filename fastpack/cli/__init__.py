"""The subcommands of ``fastpack``; each is a module with ``main(arguments) -> exit code``."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from importlib import metadata
from pathlib import Path

import torch

from fastpack.errors import FastpackError
from fastpack.utils.versions import install_command


class UsageError(FastpackError):
    """The command can't do what its arguments ask for; the message says why and how to mend it."""


def require(command: str, *packages: str) -> None:
    """Raise unless these optional packages are installed.

    Raises:
        UsageError: the message has the command that installs them.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"`fastpack {command}` needs {' and '.join(missing)}, not installed here: {install_command(*missing)}"
        )


def loading_errors() -> tuple[type[Exception], ...]:
    """Return the errors of transformers, TRL and the hub for a model that they can't build or load."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    return (OSError, ValueError, RuntimeError, ImportError, NotImplementedError, SafetensorError, StrictDataclassError)


def read_dtype(name: str) -> torch.dtype:
    """Return the dtype of a ``--dtype`` flag that is not ``auto``.

    Raises:
        UsageError: there is no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"--dtype {name}: no such dtype; pass auto, float32, bfloat16 or float16")
    return dtype


READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
"""The reader of ``datasets`` for each kind of local file."""


def require_there(name: str) -> None:
    """Raise if a name can only be a path and there is no such file or folder, before the hub is asked for it.

    Raises:
        UsageError: the message has the path.
    """
    path = Path(name)
    if (name.startswith((".", "/", "~")) or path.suffix in READERS) and not path.expanduser().exists():
        raise UsageError(f"{name}: there is no such file or folder; pass one that exists, or a name on the hub")


def require_file(flag: str, name: str | Path | None, *, made: str | Path | None = None) -> None:
    """Raise unless a file can be written, before the work that produces it.

    Args:
        flag: the flag, for the message.
        name: the file's name; None needs no file.
        made: a folder that the work creates first, or None.

    Raises:
        UsageError: the file can't be written; the message has the flag and the reason.
    """
    if name is None:
        return
    path = Path(name).absolute()
    if path.is_dir():
        raise UsageError(f"{flag} {name}: it is a folder; pass the name of a file.")
    if path.parent.is_dir():
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UsageError(f"{flag} {name}: it can't be written; pass a writable file.")
    elif made is None or path.parent != Path(made).absolute():
        raise UsageError(f"{flag} {name}: there is no folder {path.parent}; pass a file in a folder that exists.")


def require_one_process(command: str) -> None:
    """Raise if a launcher started several processes, which would all do the same work.

    Raises:
        UsageError: the message names the commands that can run in several processes.
    """
    processes = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and processes != "1":
        raise UsageError(
            f"`fastpack {command}` runs in one process, but {processes} were started: call it without torchrun or "
            "`accelerate launch` (the commands that train can use several)."
        )


PICTURES = (".png", ".svg", ".pdf")


def require_picture(flag: str, name: str | Path | None) -> None:
    """Raise unless a picture of this name can be written, in the format of its suffix.

    Args:
        flag: the flag, for the message.
        name: the file's name; None needs no file.

    Raises:
        UsageError: as :func:`require_file`, or the suffix is not one of :data:`PICTURES`.
    """
    if name is not None and Path(name).suffix.lower() not in PICTURES:
        raise UsageError(f"{flag} {name}: pass a name that ends in one of {', '.join(PICTURES)}.")
    require_file(flag, name)


CPU_TRL = "1.16"
"""The first TRL whose SFTTrainer runs on a CPU; in older versions, the loss is a Triton kernel."""


def trl_trains_on_cpu() -> bool:
    """Return whether the installed TRL can train without a GPU."""
    from packaging.version import Version

    return Version(metadata.version("trl")) >= Version(CPU_TRL)


def require_trl_on_cpu(command: str) -> None:
    """Raise unless the installed TRL can train without a GPU.

    Raises:
        UsageError: the message has the version that is needed.
    """
    if not trl_trains_on_cpu():
        raise UsageError(
            f"`fastpack {command}` on a CPU needs TRL {CPU_TRL} or newer (its older loss needs a GPU); installed is "
            f"{metadata.version('trl')}: pip install 'trl>={CPU_TRL}'"
        )


def quiet() -> None:
    """Silence library warnings that users can't act on, about unused kernels and the libraries' own defaults."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # TRL sets this by default, and transformers 5.23 warns about it
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning)
