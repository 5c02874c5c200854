"""FlexAttention's block masks: ours beside those that torch makes, and the largest tensor that making them needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """A mode that records the largest number of elements that any operation inside returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.operation = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            # a view such as expand() holds no more than what it shows
            if isinstance(value, Tensor) and value.untyped_storage().nbytes() // value.element_size() > self.elements:
                self.elements = value.untyped_storage().nbytes() // value.element_size()
                self.operation = f"{func}: {tuple(value.shape)}"
        return result


def dense_blocks(count: Tensor, indices: Tensor) -> Tensor:
    """Return a bool mask ``[Q, K]`` from the number of blocks that each row sees, and their indices."""
    dense = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for row, many in enumerate(count.flatten().tolist()):
        dense[row, indices[0, 0, row, :many].long()] = True
    return dense


def assert_same_block_mask(mine: Any, visible: Callable[..., Tensor], total: int) -> None:
    """Assert that a block mask over ``total`` tokens is what torch makes of the same rule."""
    theirs = create_block_mask(visible, 1, 1, total, total, device="cpu")
    assert mine.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert mine.seq_lengths == theirs.seq_lengths
    assert torch.equal(mine.to_dense(), theirs.to_dense())
    for side in ("kv", "q"):  # the backward walks over the second
        for kind in ("", "full_"):
            count, indices = (f"{kind}{side}_num_blocks", f"{kind}{side}_indices")
            actual = dense_blocks(getattr(mine, count), getattr(mine, indices))
            assert torch.equal(actual, dense_blocks(getattr(theirs, count), getattr(theirs, indices))), count
    # inside the blocks that are neither full nor empty, token by token
    token, zero = torch.arange(total), torch.zeros((), dtype=torch.long)
    pairs = (zero, zero, token[:, None], token)
    assert torch.equal(mine.mask_mod(*pairs), visible(*pairs))
