"""A frozen parameter that holds a stack of quantised weights, and behaves like the dense stack.

Shape and dtype are those of the dense stack, so that PEFT gives LoRA's factors the right sizes. A function of torch
that gets the parameter gets a dense copy; ``stack[expert]`` makes one matrix dense. The memory is that of the packed
bytes: they are what moves between devices, is copied, pickled, saved, and broadcast by DDP, whose C++ sees the bytes.

A module that holds such parameters saves and loads them by hooks on its state dict (:func:`save_by_hooks`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fastpack.ops.stack_formats import StackFormat

_OF_BYTES = {
    *("__hash__", "backward", "data_ptr", "get_device", "has_names", "is_contiguous", "is_inference", "is_pinned"),
    *("is_shared", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"),
    *("share_memory_", "storage", "untyped_storage"),
}
"""The names of the methods that act on the packed bytes."""
_OF_VALUES = {"T", "H", "mT", "mH", "real", "imag"}
"""The names of the properties that are values of the dense stack. All others are facts about the memory."""


class QuantizedStack(nn.Parameter):
    """A stack ``[E, ., .]`` of quantised weights, as a parameter that never trains.

    Attributes:
        stack_format: the format of the packed bytes.

    Example:
        >>> packed, state = bitsandbytes.functional.quantize_4bit(dense, quant_type="nf4")  # doctest: +SKIP
        >>> stack = QuantizedStack(packed, FourBitFormat(state, torch.bfloat16))  # doctest: +SKIP
        >>> stack.shape == dense.shape, stack.packed.dtype  # doctest: +SKIP
        (True, torch.uint8)
    """

    stack_format: StackFormat

    def __new__(cls, packed: Tensor, stack_format: StackFormat) -> QuantizedStack:
        """Make the parameter from packed bytes, which it shares, and their format."""
        self: QuantizedStack = torch.Tensor._make_subclass(cls, packed.detach(), False)
        self.stack_format = stack_format
        return self

    def __init__(self, packed: Tensor, stack_format: StackFormat) -> None:
        """Do nothing more: a parameter's ``__init__`` takes other arguments."""

    @property
    def packed(self) -> Tensor:
        """The packed bytes, as a plain tensor that shares their memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def dense(self) -> Tensor:
        """Return a dense copy."""
        return self.stack_format.dense(self.packed)

    # --- what it is: the dense stack ---------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of the dense stack."""
        return self.stack_format.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of a dense copy."""
        return self.stack_format.dtype

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """3."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The number of packed bytes."""
        return self.packed.nbytes

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the dense stack, or one of its dimensions."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return 3."""
        return self.ndim

    def numel(self) -> int:
        """Return the number of weights."""
        return self.shape.numel()

    nelement = numel

    def element_size(self) -> int:
        """Return the bytes of a weight of a dense copy."""
        return self.dtype.itemsize

    def is_floating_point(self) -> bool:
        """Return True."""
        return True

    def is_complex(self) -> bool:
        """Return False."""
        return False

    def __len__(self) -> int:
        """Return E, the number of experts."""
        return self.shape[0]

    def __getitem__(self, index: Any) -> Tensor:
        """Return a part of a dense copy; of a single expert only its matrix is made dense."""
        if isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0 and index.dtype != torch.bool):
            expert = range(len(self))[int(index)]
            return self.stack_format.expert(self.packed, expert)
        return self.dense()[index]

    def __repr__(self, **settings: Any) -> str:  # type: ignore[override]
        """Return the format, shape, dtype and device."""
        return f"QuantizedStack({self.stack_format.name}, {tuple(self.shape)}, {self.dtype}, device={self.device})"

    # --- what moves and is copied: the packed bytes ------------------------------------------------------------------

    def _like(self, packed: Tensor, dtype: torch.dtype | None = None) -> QuantizedStack:
        """Return a stack with these bytes in the same format, with its tensors on their device."""
        device = None if packed.device == self.device else packed.device
        return QuantizedStack(packed, self.stack_format.to(device, dtype or self.dtype))

    def detach(self) -> QuantizedStack:
        """Return a stack that shares the bytes."""
        return QuantizedStack(self.packed, self.stack_format)

    @property  # type: ignore[override]
    def data(self) -> QuantizedStack:
        """A stack that shares the bytes."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        _refuse_dense(value)
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.data.__set__(self, value.packed)  # type: ignore[attr-defined]
        self.stack_format = value.stack_format

    def clone(self, *, memory_format: Any = torch.preserve_format) -> QuantizedStack:
        """Return a stack with bytes of its own."""
        return self._like(self.packed.clone())

    def to(self, *args: Any, **kwargs: Any) -> QuantizedStack:
        """Return the stack on another device; another dtype is one of dense copies, not of the bytes."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"a QuantizedStack has dense copies of a float dtype, not of {dtype}. Call dense() first.")
        moved = self.packed if device is None else self.packed.to(device, non_blocking=non_blocking)
        return self._like(moved, dtype)

    def cpu(self, *args: Any, **kwargs: Any) -> QuantizedStack:
        """Return the stack on the CPU."""
        return self._like(self.packed.cpu())

    def cuda(self, *args: Any, **kwargs: Any) -> QuantizedStack:
        """Return the stack on a CUDA device."""
        return self._like(self.packed.cuda(*args, **kwargs))

    def pin_memory(self, *args: Any) -> QuantizedStack:
        """Return the stack with its bytes in pinned memory."""
        return self._like(self.packed.pin_memory())

    def contiguous(self, *args: Any, **kwargs: Any) -> QuantizedStack:
        """Return the stack itself."""
        return self

    def float(self) -> QuantizedStack:
        """Return the stack, with dense copies in float32."""
        return self._like(self.packed, torch.float32)

    def double(self) -> QuantizedStack:
        """Return the stack, with dense copies in float64."""
        return self._like(self.packed, torch.float64)

    def half(self) -> QuantizedStack:
        """Return the stack, with dense copies in float16."""
        return self._like(self.packed, torch.float16)

    def bfloat16(self) -> QuantizedStack:
        """Return the stack, with dense copies in bfloat16."""
        return self._like(self.packed, torch.bfloat16)

    def copy_(self, source: Any, non_blocking: bool = False) -> QuantizedStack:
        """Copy another stack's bytes and format into this one."""
        _refuse_dense(source)
        self.data = source.to(self.device, source.dtype).clone()
        return self

    def set_(self, source: Any) -> QuantizedStack:  # type: ignore[override]
        """Share another stack's bytes and format."""
        self.data = source
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedStack:
        """Return a stack with bytes and a format of its own."""
        if id(self) not in memo:
            stack_format = copy.deepcopy(self.stack_format, memo)
            memo[id(self)] = QuantizedStack(self.packed.clone(), stack_format)
        copied: QuantizedStack = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the bytes and their format."""
        return QuantizedStack, (self.packed, self.stack_format)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with dense copies, or with the packed bytes if it is about memory.

        Raises:
            RuntimeError: the function writes to the stack.
        """
        kwargs = kwargs or {}
        name = func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            descriptor: Any = getattr(func, "__self__", None)
            on_bytes = descriptor.__name__ not in _OF_VALUES
        else:
            on_bytes = name in _OF_BYTES
        if on_bytes:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(args[0] if args else None, QuantizedStack):
            own = _OWN.get(name)
            if own is not None:
                return own(*args, **kwargs)
            if _writes(name):
                _refuse_write(name)
        return func(*tree_map(_dense, args), **tree_map(_dense, kwargs))


_OWN: dict[str, Callable[..., Any]] = {
    name: getattr(QuantizedStack, name) for name in ("clone", "detach", "is_floating_point", "is_complex", "numel")
}
_OWN["empty_like"] = lambda stack, **settings: stack._like(
    torch.empty_like(stack.packed, device=settings.get("device")), settings.get("dtype")
)
"""The functions of torch that return a stack, or a fact about one, by name."""


def _dense(value: Any) -> Any:
    return value.dense() if isinstance(value, QuantizedStack) else value


def _writes(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _refuse_write(name: str) -> None:
    # not a TypeError, for which Python would try another method
    raise RuntimeError(
        f"{name} would write to a quantised stack of experts, whose values can't change. To merge an adapter, load the "
        "dense model and merge it there; to train the experts' own weights, don't quantise them."
    )


def _refuse_dense(value: Any) -> None:
    if not isinstance(value, QuantizedStack):
        raise TypeError(
            f"a quantised stack of experts can't take dense values, {tuple(value.shape)} of {value.dtype}. Load a "
            "dense checkpoint before fastpack.quantize_experts(model), or a state dict of quantised experts after it."
        )


def save_by_hooks(module: nn.Module) -> None:
    """Let a module save and load its quantised stacks as plain tensors, which any format of files takes."""
    if not any(getattr(hook, "__func__", hook) is _save for hook in module._state_dict_hooks.values()):
        module.register_state_dict_post_hook(_save)
        module.register_load_state_dict_pre_hook(_load)


def _save(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: object) -> None:
    for name, stack in module._parameters.items():
        if isinstance(stack, QuantizedStack) and state.pop(prefix + name, None) is not None:
            state.update(
                {prefix + name + rest: value for rest, value in stack.stack_format.saved(stack.packed).items()}
            )


def _load(module: nn.Module, state: dict[str, Any], prefix: str, *details: Any) -> None:
    for name, stack in module._parameters.items():
        if isinstance(stack, QuantizedStack):
            key = prefix + name
            names = {key, f"{key}_blocks", f"{key}_scales"}
            entries = {k[len(key) :]: v for k, v in state.items() if k in names or k.startswith(f"{key}.")}
            loaded = stack.stack_format.loaded(entries)
            if loaded is not None:
                for rest in entries:
                    del state[key + rest]
                state[key] = QuantizedStack(*loaded)
