"""A linear layer of all experts: its matmuls over rows that are sorted by expert, and its gradients.

A quantised stack is made dense for one matmul at a time, in the forward and again in the backward. So there is at most
one dense stack, and none is kept.

Shape suffixes: T tokens, K choices of a token, E experts, R rows, at most T K, I inputs, O outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fastpack.ops.expert_operands import NARROWEST, STEP, Gate, Routing, Stack
from fastpack.ops.experts.grouped_matmul import grouped_matmul, grouped_outer
from fastpack.ops.experts.lora_factors import pack_factors
from fastpack.ops.implementation import Implementation
from fastpack.ops.linear.operands import Lora
from fastpack.ops.row_count import RowCount
from fastpack.ops.stack_formats import StackFormat


@dataclass(frozen=True, eq=False)
class ExpertLinear:
    """A linear layer for each expert.

    Attributes:
        weight: ``[E, O, I]``, or ``[E, I, O]`` if the stacks are transposed; packed bytes if there is a ``format``.
        bias: ``[E, O]``, or None.
        lora: the update, with A ``[E r, I]`` and B ``[O, r E]``, or None.
        format: the format of a quantised stack, or None for a dense one.
    """

    weight: Tensor
    bias: Tensor | None = None
    lora: Lora | None = None
    format: StackFormat | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight, as if it was dense."""
        return self.weight.shape if self.format is None else self.format.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight, as if it was dense."""
        return self.weight.dtype if self.format is None else self.format.dtype

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Weight, bias, A and B."""
        lora = self.lora
        return self.weight, self.bias, None if lora is None else lora.a, None if lora is None else lora.b


@dataclass(frozen=True)
class ExpertSettings:
    """The settings of a block of experts: everything but its tensors.

    Attributes:
        dtype: the dtype of the matmuls.
        gate: the gated unit.
        transposed: whether stacks are ``[E, I, O]``.
        scales: the scales of the updates of both layers.
        formats: the formats of the stacks of both layers, None for a dense one.
        implementation: the implementation of the ops.
        dequantize: the implementation that makes stacks dense.
        row_count: the number of real tokens, or None if all are.
        most_rows: R, if it is known to be less than T K.
    """

    dtype: torch.dtype
    gate: Gate
    transposed: bool
    scales: tuple[float, float]
    formats: tuple[StackFormat | None, StackFormat | None]
    implementation: Implementation
    dequantize: Implementation
    row_count: RowCount | None = None
    most_rows: int | None = None

    def leave_out(self, matrices: Sequence[torch.Size], choices: int) -> None:
        """Tell the row count what this pass leaves out for each row of bucket padding."""
        if self.row_count is not None and self.implementation == "triton":
            self.row_count.launches += 1
            self.row_count.work += 2 * choices * sum(shape[1] * shape[2] for shape in matrices)


@dataclass(frozen=True, eq=False)
class ExpertLayer:
    """A linear layer of all experts, with its tensors in the dtype of the matmuls.

    Attributes:
        shape: the shape of the stack, as if it was dense.
        bias: ``[E, O]`` or None.
        a: A as ``[E, r, I]``, or None without an update; for kernels, r is padded by zeros.
        b: B as ``[E, O, r]``, or None.
        scale: the scale of the update.
        settings: the settings of the block.
        format: the format of a quantised stack, or None.
        tensors: weight, bias, A and B as the user has them.
    """

    shape: torch.Size
    bias: Tensor | None
    a: Stack | None
    b: Stack | None
    scale: float
    settings: ExpertSettings
    format: StackFormat | None
    tensors: Sequence[Tensor | None]

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], settings: ExpertSettings, which: int) -> ExpertLayer:
        """Return a layer from its weight, bias, A and B; ``which`` is 0 for the first one, 1 for the last."""
        weight, bias, a, b = tensors
        assert weight is not None
        dtype, stack_format = settings.dtype, settings.formats[which]
        shape = weight.shape if stack_format is None else stack_format.shape
        of_dtype = None if bias is None else bias.to(dtype).contiguous()
        layer = cls(shape, of_dtype, None, None, settings.scales[which], settings, stack_format, tensors)
        if a is None or b is None:
            return layer
        of_a, of_b = pack_factors(a, b, shape[0], dtype, for_kernels=settings.implementation == "triton")
        return replace(layer, a=Stack(of_a, transposed=True), b=Stack(of_b, transposed=True))

    @property
    def transposed(self) -> bool:
        """True if the matrices are stored as ``[O, I]``."""
        return self.settings.transposed == (self.format is not None and self.format.transposed)

    def stack(self, routing: Routing) -> Stack:
        """Return the weights, dense and in the dtype of the matmuls; a copy of those that are not."""
        weight, settings = self.tensors[0], self.settings
        assert weight is not None
        if self.format is None:
            return Stack(weight.to(settings.dtype).contiguous(), self.transposed)
        # a kernel's last step may read the next expert's matrix, times zero
        defined = any(size % STEP for size in self.shape[1:])
        offsets = None if defined else routing.offsets
        dense = self.format.stored(weight, settings.dtype, settings.dequantize, offsets)
        return Stack(dense, self.transposed)

    def shrink(self, x: Tensor, routing: Routing) -> Tensor | None:
        """Return ``scale x A^T``, ``[R, r]``, or None without an update."""
        return None if self.a is None else grouped_matmul(x, self.a, routing, scale=self.scale)

    def forward(self, x: Tensor, low: Tensor | None, routing: Routing) -> Tensor:
        """Return the layer's result ``[R, O]`` for rows ``x [R, I]``."""
        update = None if low is None or self.b is None else (low, self.b)
        return grouped_matmul(x, self.stack(routing), routing, bias=self.bias, update=update)

    def shrink_grad(self, grad: Tensor, routing: Routing) -> Tensor | None:
        """Return ``scale grad B``, ``[R, r]``, or None without an update."""
        return None if self.b is None else grouped_matmul(grad, self.b.flipped(), routing, scale=self.scale)

    def backward(self, grad: Tensor, low: Tensor | None, routing: Routing) -> Tensor:
        """Return the gradient of the layer's input, ``[R, I]``, from that of its result ``[R, O]``."""
        update = None if low is None or self.a is None else (low, self.a.flipped())
        return grouped_matmul(grad, self.stack(routing).flipped(), routing, update=update)

    def gradients(
        self,
        x: Tensor | None,
        grad: Tensor,
        low: Tensor | None,
        shrunk: Tensor | None,
        routing: Routing,
        needs: Sequence[bool],
        *,
        weights: Tensor | None = None,
    ) -> list[Tensor | None]:
        """Return the gradients of weight, bias, A and B.

        Args:
            x: the layer's input ``[R, I]``, times ``weights``; None if neither the weight nor A needs a gradient.
            grad: the gradient of its result ``[R, O]``.
            low: the result of :meth:`shrink`.
            shrunk: the result of :meth:`shrink_grad`.
            routing: the rows.
            needs: which of the tensors need a gradient.
            weights: ``[R, 1]``, the factor of each row's gradient, or None for 1.
        """
        weight, bias, a, b = self.tensors
        gradients: list[Tensor | None] = [None] * 4
        if needs[0]:
            assert weight is not None
            assert x is not None
            pair = (grad, x) if self.transposed else (x, grad)
            gradients[0] = grouped_outer(*pair, routing, weight.new_empty(weight.shape))
        if needs[1]:
            assert bias is not None
            ones = grad.new_ones(len(grad), 1) if weights is None else weights
            gradients[1] = out = bias.new_empty(bias.shape)
            grouped_outer(F.pad(ones, (0, NARROWEST - 1)), grad, routing, out[:, None])
        if needs[2]:
            assert a is not None
            assert x is not None
            assert shrunk is not None
            gradients[2] = out = a.new_empty(a.shape)
            grouped_outer(shrunk, x, routing, out.view(routing.experts, -1, a.shape[1]))
        if needs[3]:
            assert b is not None
            assert low is not None
            gradients[3] = out = b.new_empty(b.shape)
            by_expert = out.view(len(b), -1, routing.experts).permute(2, 1, 0)
            grouped_outer(low if weights is None else low * weights, grad, routing, by_expert)
        return gradients
