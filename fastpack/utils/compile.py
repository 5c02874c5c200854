"""Run a patched model under ``torch.compile``.

Patch the model first, then compile all of it. Its collator has to read the lengths of each batch::

    packed = PackedSeqLens.from_lengths(lengths).bucketed()
    batch = {
        "input_ids": packed.unpad(input_ids),  # [1, T], where T is the bucket's size
        "labels": packed.unpad(packed.mask_first_labels(labels)),  # the labels of bucket padding are ignored
        "packed_seq_lens": packed.flattened(),
    }
    model = torch.compile(fastpack.patch(model), fullgraph=True)

Everything that the compiler guards on, shapes included, is the same for all batches of a bucket, so there are no more
compilations than buckets. By default torch compiles for the first sizes and then once for all sizes; with
``dynamic=False`` it compiles each bucket (for more than eight buckets raise ``torch._dynamo.config.recompile_limit``).
Without ``bucketed()`` it also ends with one compilation for all sizes.

For any other batch (padded, or with restarting ``position_ids``), the host reads the lengths before the compiled
region, which ``fullgraph=True`` does not allow. Don't compile layers one by one: each has its own forward, so each
would need its own compilation.

Our kernels and autograd Functions are not used here: the compiler fuses the plain definitions with their neighbours.
Attention runs on ``torch_varlen`` if that serves the call, else on any backend as one operator
(:mod:`fastpack.backends.custom_op`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Output = TypeVar("Output")


@contextmanager
def activation_memory_budget(fraction: float) -> Iterator[None]:
    """Let ``torch.compile`` keep a share of the activations, and recompute the rest in the backward.

    The compiler recomputes what is cheap. It reads this setting, its own ``activation_memory_budget``, when it
    compiles: put the context around every step that may compile. It does nothing outside compiled regions, and changes
    no result.

    Args:
        fraction: the share to keep, from 0 (only the inputs of the compiled region) to 1 (all that makes the backward
            faster).

    Raises:
        ValueError: ``fraction`` is not from 0 to 1.

    Example:
        >>> with fastpack.activation_memory_budget(0.5):
        ...     model(**batch).loss.backward()
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"activation_memory_budget takes a fraction from 0 to 1, not {fraction!r}: 0.5 keeps half.")
    from torch._functorch import config

    with config.patch(activation_memory_budget=float(fraction)):
        yield


def compile_often(function: Callable[Arguments, Output], limit: int, **settings: Any) -> Callable[Arguments, Output]:
    """Return ``torch.compile(function, **settings)`` that may recompile ``limit`` times, instead of 8."""
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        settings["recompile_limit"] = limit
        return torch.compile(function, **settings)
    return _with_limit(torch.compile(function, **settings), limit)


def _with_limit(compiled: Callable[Arguments, Output], limit: int) -> Callable[Arguments, Output]:
    """Do what ``recompile_limit`` does in newer releases of torch: raise dynamo's setting while it may compile."""
    from torch._dynamo import config

    @functools.wraps(compiled)
    def within(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Output:
        before = config.recompile_limit
        config.recompile_limit = max(before, limit)  # config.patch takes ten times as long
        try:
            return compiled(*args, **kwargs)
        finally:
            config.recompile_limit = before

    return within


def constant(function: Callable[Arguments, Output]) -> Callable[Arguments, Output]:
    """Mark a function that ``torch.compile`` calls while it traces, and whose result it takes for a constant.

    Such a function gives the same result for the same arguments as long as the process lives. The results are strings,
    bools, numbers, None or tuples of these.
    """
    # torch.compiler.assume_constant_result sets the same mark, but `import fastpack` must not import the compiler
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def cached_constant(function: Callable[Arguments, Output]) -> Callable[Arguments, Output]:
    """Cache a function's results, and mark it as a :func:`constant`.

    With ``functools.cache`` alone the compiler would look through the cache into the function.
    """
    cached: Any = functools.cache(function)

    @functools.wraps(function)
    def call_cached(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Output:
        return cached(*args, **kwargs)

    call_cached.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    return constant(call_cached)
