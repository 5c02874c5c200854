"""A patched model under ``torch.compile``.

Compile the whole model, after patching it, and feed it batches whose lengths were read in the collator::

    packed = PackedSeqLens.from_lengths(lengths).bucketed()
    batch = {
        "input_ids": packed.unpad(input_ids),  # [1, T] to the bucket's T
        "labels": packed.unpad(packed.mask_first_labels(labels)),  # those of bucket padding are ignored
        "packed_seq_lens": packed.flattened(),
    }
    model = torch.compile(fastpack.patch(model), fullgraph=True)

Shapes, and all else that is guarded, are the bucket's, so that nothing is compiled more often than there are buckets:
by default for the first sizes and then for any, with ``dynamic=False`` for each bucket (for more than eight of them
raise ``torch._dynamo.config.recompile_limit``). Without ``bucketed()`` sizes come to stand for any as well.

Any other batch (padded, or with restarting ``position_ids``) has its lengths read on the host before the one compiled
region that does the rest; ``fullgraph=True`` does not allow that. Layers should not be compiled one by one: each has
a forward of its own, so each would be compiled.

Kernels and Functions of ours stay out: a compiler fuses the plain definitions with their neighbours. Attention runs on
``torch_varlen`` where that serves, else on any backend as one operator (:mod:`fastpack.backends.custom_op`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Found = TypeVar("Found")


@contextmanager
def activation_memory_budget(fraction: float) -> Iterator[None]:
    """Let ``torch.compile`` keep this share of the activations that a backward pass would like, and recompute the rest.

    The compiler chooses what is cheap to compute again (its own setting ``activation_memory_budget``, which it reads
    when it compiles: put this around the steps that do, and those that may compile anew). Outside compiled regions it
    does nothing. Results stay what they are.

    Args:
        fraction: from 0, the inputs of the compiled region alone, to 1, whatever makes the backward fastest.

    Raises:
        ValueError: ``fraction`` is not from 0 to 1.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"activation_memory_budget takes a fraction from 0 to 1, not {fraction!r}: 0.5 keeps half.")
    from torch._functorch import config

    with config.patch(activation_memory_budget=float(fraction)):
        yield


def compile_often(function: Callable[Arguments, Found], limit: int, **settings: Any) -> Callable[Arguments, Found]:
    """``torch.compile(function, **settings)``, anew up to ``limit`` times, not 8."""
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        settings["recompile_limit"] = limit
        return torch.compile(function, **settings)
    return _with_limit(torch.compile(function, **settings), limit)


def _with_limit(compiled: Callable[Arguments, Found], limit: int) -> Callable[Arguments, Found]:
    """Do what ``recompile_limit`` does, for torch before it had that: dynamo's own setting, while it may compile."""
    from torch._dynamo import config

    @functools.wraps(compiled)
    def within(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Found:
        before = config.recompile_limit
        config.recompile_limit = max(before, limit)  # config.patch takes ten times as long
        try:
            return compiled(*args, **kwargs)
        finally:
            config.recompile_limit = before

    return within


def constant(function: Callable[Arguments, Found]) -> Callable[Arguments, Found]:
    """Mark what ``torch.compile`` is to call while it traces, and take for a constant: the same results for the same
    arguments as long as the process lives, and these are strings, bools, numbers, None or tuples of them."""
    # as torch.compiler.assume_constant_result does, which imports the compiler: `import fastpack` is not the time
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def known_once(function: Callable[Arguments, Found]) -> Callable[Arguments, Found]:
    """``functools.cache`` that is a :func:`constant`: the compiler would look through the cache into the function."""
    cached: Any = functools.cache(function)

    @functools.wraps(function)
    def known(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Found:
        return cached(*args, **kwargs)

    known.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    return constant(known)
