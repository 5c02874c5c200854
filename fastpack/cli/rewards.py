"""Reward functions by name: TRL's own, a function in a Python file, or one in a module that can be imported."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from trl import rewards as of_trl
from trl.import_utils import is_math_verify_available

from fastpack.cli import UsageError

Reward = Callable[..., Any]

OVERLONG = "get_soft_overlong_punishment"
OF_TRL = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", OVERLONG)
"""The names that TRL's own script takes."""
CHECKING_MATHS = OF_TRL[:2]

PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""The keywords that ``GRPOTrainer`` passes beside the columns of the data."""

FORMS = f"FILE.py:FUNCTION, MODULE.FUNCTION, or one of TRL's {', '.join(OF_TRL)}"


def load_rewards(names: Iterable[str]) -> list[Reward]:
    """Return the reward functions of these names.

    Raises:
        UsageError: there is no such file, module or function, or ``GRPOTrainer`` can't call it; the message says why.
    """
    return [_load(name) for name in names]


def _load(name: str) -> Reward:
    if name in OF_TRL:
        if name in CHECKING_MATHS and not is_math_verify_available():
            raise UsageError(f"--reward_funcs {name}: it needs math-verify: pip install math-verify")
        reward: Reward = getattr(of_trl, name)
        return (
            reward(max_completion_len=1280, soft_punish_cache=256) if name == OVERLONG else reward
        )  # as in its script
    path, colon, function = name.rpartition(":")
    if colon:
        return _checked(name, _module_of_file(name, Path(path).expanduser()), function)
    module, dot, function = name.rpartition(".")
    if not dot or function == "py":
        raise UsageError(f"--reward_funcs {name}: pass {FORMS}")
    if (here := str(Path.cwd())) not in sys.path:  # as TRL's script does
        sys.path.insert(0, here)
    return _checked(name, _run(name, module, lambda: importlib.import_module(module)), function)


def _run(name: str, source: str | Path, load: Callable[[], ModuleType]) -> ModuleType:
    """Return the module that a function loads; whatever its code raises is the user's to mend."""
    try:
        return load()
    except ModuleNotFoundError as error:
        raise UsageError(f"--reward_funcs {name}: {source}: {error}; pass {FORMS}") from error
    except Exception as error:
        raise UsageError(f"--reward_funcs {name}: {source} raised {type(error).__name__}: {error}") from error


def _module_of_file(name: str, path: Path) -> ModuleType:
    """Return the module in a file, which may import others beside it."""
    if not path.is_file():
        raise UsageError(f"--reward_funcs {name}: there is no file {path}; pass {FORMS}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--reward_funcs {name}: {path} does not end in .py; pass {FORMS}")
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    module, execute = importlib.util.module_from_spec(spec), spec.loader.exec_module

    def load() -> ModuleType:
        execute(module)
        return module

    return _run(name, path, load)


def _checked(name: str, module: ModuleType, function: str) -> Reward:
    """Return a module's function if ``GRPOTrainer`` can call it."""
    reward: Any = getattr(module, function, None)
    if not callable(reward):
        own = [each for each, value in vars(module).items() if inspect.isfunction(value) and not each.startswith("_")]
        raise UsageError(
            f"--reward_funcs {name}: {module.__name__} has no function {function!r}, only {', '.join(own) or 'none'}"
        )
    parameters = inspect.signature(reward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise UsageError(
            f"--reward_funcs {name}: {function} has no **kwargs, but TRL passes prompts, completions, completion_ids, "
            f"the data's columns and more as keywords. Write: def {function}(completions, **kwargs)"
        )
    return reward


def check_columns(functions: Iterable[Reward], columns: Collection[str], data: str) -> None:
    """Raise unless the data has a column for each parameter without a default.

    Raises:
        UsageError: the message names the function and the column.
    """
    for reward in functions:
        for parameter in inspect.signature(reward).parameters.values():
            optional = parameter.default is not parameter.empty
            variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if optional or variadic or parameter.name in PASSED or parameter.name in columns:
                continue
            raise UsageError(
                f"the reward function {reward.__name__} takes {parameter.name!r}, but {data} has the columns "
                f"{', '.join(sorted(columns))}: add that column, or give the parameter a default"
            )
