"""A block of experts as an autograd Function, and another one for its last matmul.

Definition, for token t that chose experts e_1 ... e_K with weights w_1 ... w_K:

    y_t = sum over k of w_k down_e(gate(inner_e(x_t))),  e = e_k

``inner`` makes gate and up. Both matmuls may have a bias, and a LoRA update that each expert has for itself. The sum is
computed in float32 in the order of k, so that a recomputation gives the same bits; nothing waits for the device.

The updates are PEFT's (``target_parameters``): A ``[E r, I]`` holds the experts one after the other, and in B
``[O, r E]`` the expert is the fastest index. They are low-rank terms inside the matmuls with the weights: there is
never a dense update of a stack, nor a gradient of a frozen one.

The backward computes the rows of x and the gated unit again. The gradient of a weight w_k is <dy down_e^T, a>, with a
the input of ``down``, so the K results of a token need not be kept.

The last matmul is apart for the sake of gradient checkpointing: it saves nothing, and torch stops a recomputation when
the last saved tensor is there. So that matmul, a third of the forward, is not computed again at the end of a layer.

A quantised stack is made dense for one matmul at a time, in the forward and again in the backward. So there is at most
one dense stack, and none is kept.

Shape suffixes: T tokens, K choices of a token, E experts, R rows, at most T K, H hidden size, I size inside, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastpack.ops.autograd import differentiable_once, is_last_pass, without_memory
from fastpack.ops.expert_operands import NARROWEST, STEP, Gate, Routing, Stack
from fastpack.ops.experts.gate import gate_backward, gate_forward
from fastpack.ops.experts.grouped_matmul import grouped_matmul, grouped_outer, kernel_rejects
from fastpack.ops.experts.lora_factors import pack_factors
from fastpack.ops.experts.routing import gather_rows, route, row_weights, sum_rows
from fastpack.ops.implementation import Implementation, kernel_serves, use_triton
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


def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    inner: ExpertLinear,
    down: ExpertLinear,
    gate: Gate,
    *,
    transposed: bool = False,
    dtype: torch.dtype | None = None,
    row_count: RowCount | None = None,
    most_rows: int | None = None,
    implementation: Implementation = "auto",
) -> Unfinished:
    """Run each token through the experts that it chose, as far as the last matmul, which ``finish()`` runs.

    Args:
        x: ``[T, H]``.
        index: ``[T, K]`` of int64 or int32, the chosen experts. A choice of E or more adds nothing.
        weights: ``[T, K]`` of any float dtype.
        inner: the layer to gate and up.
        down: the last layer.
        gate: the gated unit between them.
        transposed: whether the weights of both layers are ``[E, I, O]``.
        dtype: the dtype of the matmuls; by default that of the weights.
        row_count: the number of the T tokens that count, or None for all. Kernels leave the others out.
        most_rows: how many choices are of an expert here, at most, so that no memory is taken for more; None for T K.
        implementation: ``auto`` runs the kernels if :func:`fastpack.ops.implementation.use_triton` allows it, and they
            support dtype and sizes. Else each expert's rows are multiplied by torch, and the host waits for their
            numbers.

    Returns:
        The block before its last matmul; ``finish()`` returns ``[T, H]`` in x's dtype.

    Raises:
        ValueError: the shape of A or B doesn't fit; or ``implementation="triton"``, and the kernels don't support
            dtype, sizes or places in memory.

    Example:
        >>> x, index, weights = torch.randn(5, 8), torch.tensor([[0, 2]] * 5), torch.full((5, 2), 0.5)
        >>> inner, down = ExpertLinear(torch.randn(3, 8, 8)), ExpertLinear(torch.randn(3, 8, 4))
        >>> experts(x, index, weights, inner, down, Gate("silu")).finish().shape
        torch.Size([5, 8])
    """
    dtype = inner.dtype if dtype is None else dtype
    requested = implementation
    for layer in (inner, down):
        _check_lora(layer, transposed)
    scales = tuple(1.0 if layer.lora is None else layer.lora.scale for layer in (inner, down))
    if use_triton(implementation, x):
        widths = [*inner.shape[1:], *down.shape[1:]]
        served = kernel_serves(implementation, "experts", kernel_rejects(dtype, widths, [inner.weight, down.weight]))
        implementation = "triton" if served else "torch"
    else:
        implementation = "torch"
    formats = inner.format, down.format
    settings = ExpertSettings(
        dtype, gate, transposed, (scales[0], scales[1]), formats, implementation, requested, row_count, most_rows
    )
    return Unfinished(*_Experts.apply(x, index, weights, settings, *inner.tensors, *down.tensors))


def _check_lora(layer: ExpertLinear, transposed: bool) -> None:
    if layer.lora is None:
        return
    count, *sides = layer.shape
    columns, width = reversed(sides) if transposed else sides
    a, b = layer.lora.a, layer.lora.b
    rank = a.shape[0] // count
    if a.shape != (rank * count, width) or b.shape != (columns, rank * count):
        raise ValueError(
            f"A is {tuple(a.shape)} and B {tuple(b.shape)}, but a stack of {count} experts from {width} to {columns} "
            f"has A (E r, {width}) and B ({columns}, r E)."
        )


@dataclass(frozen=True, eq=False)
class Unfinished:
    """A block of experts before its last matmul.

    Attributes:
        stand_in: a tensor without memory that stands for the result in autograd's graph.
        inputs: the inputs of the rest.
    """

    stand_in: Tensor
    inputs: _LastInputs

    def finish(self) -> Tensor:
        """Return the block's result ``[T, H]``."""
        result: Tensor = _Finish.apply(self.stand_in, self.inputs)
        return result


class _Experts(torch.autograd.Function):
    """The forward of :func:`experts` without its end, and its whole backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, weights: Tensor, settings: ExpertSettings, *tensors: Tensor | None
    ) -> tuple[Tensor, _LastInputs]:
        inner, down = (_Layer.of(tensors[4 * i : 4 * i + 4], settings, i) for i in (0, 1))
        routing = route(
            index,
            inner.shape[0],
            row_count=settings.row_count,
            most_rows=settings.most_rows,
            implementation=settings.implementation,
        )
        settings.leave_out([inner.shape], routing.choices)
        n = gather_rows(x.to(settings.dtype), routing)
        low = inner.shrink(n, routing)
        between = inner.forward(n, low, routing)
        del n
        a = gate_forward(between, settings.gate, routing)
        low_down = down.shrink(a, routing)
        ctx.settings, ctx.routing = settings, routing
        ctx.save_for_backward(x, weights, between, low, low_down, *tensors)
        return without_memory(x, x.shape), _LastInputs(a, low_down, weights, down, routing)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        settings, routing = ctx.settings, ctx.routing
        x, weights, between, low, low_down, *tensors = ctx.saved_tensors
        inner, down = (_Layer.of(tensors[4 * i : 4 * i + 4], settings, i) for i in (0, 1))
        needs_x, needs_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        needs_inner, needs_down = ctx.needs_input_grad[4:8], ctx.needs_input_grad[8:12]
        settings.leave_out([inner.shape, down.shape], routing.choices)

        d = gather_rows(grad.to(settings.dtype), routing)
        shrunk_down = down.shrink_grad(d, routing)
        a = down.backward(d, shrunk_down, routing)
        of_between, of_weights = gate_backward(
            a,
            between,
            weights,
            settings.gate,
            routing,
            keep=needs_down[0] or needs_down[2],
            overwrite=is_last_pass(),
        )
        if needs_weights and down.bias is not None:
            columns = Stack(down.bias[:, None], transposed=True)
            by_bias = grouped_matmul(d, columns, routing)[:, 0].where(routing.real_rows(), 0)
            of_weights.view(-1)[routing.order] += by_bias
        by_row = row_weights(weights, routing).to(settings.dtype) if needs_down[1] or needs_down[3] else None
        # if a is needed, it is each row's input of down times its weight from here on
        grads_down = down.gradients(a, d, low_down, shrunk_down, routing, needs_down, weights=by_row)
        del a, d
        shrunk = inner.shrink_grad(of_between, routing)
        n = gather_rows(x.to(settings.dtype), routing) if any((needs_inner[0], needs_inner[2])) else None
        grads_inner = inner.gradients(n, of_between, low, shrunk, routing, needs_inner)
        del n
        of_x = None
        if needs_x:
            of_x = sum_rows(inner.backward(of_between, shrunk, routing), routing).to(x.dtype)
        return of_x, None, of_weights.to(weights.dtype) if needs_weights else None, None, *grads_inner, *grads_down


class _Finish(torch.autograd.Function):
    """The end of the forward. The gradient of the result is that of its stand-in."""

    @staticmethod
    def forward(_: Any, stand_in: Tensor, inputs: _LastInputs) -> Tensor:
        return inputs.finish().to(stand_in.dtype)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@dataclass(frozen=True, eq=False)
class _LastInputs:
    """The inputs of the end of a forward.

    Attributes:
        a: ``[R, I]``, the input of the last matmul.
        low: ``[R, r]``, the result of :meth:`_Layer.shrink` for it, or None.
        weights: ``[T, K]``, the weights of the chosen experts.
        down: the last layer.
        routing: the rows.
    """

    a: Tensor
    low: Tensor | None
    weights: Tensor
    down: _Layer
    routing: Routing

    def finish(self) -> Tensor:
        """Return the block's result ``[T, H]``."""
        self.down.settings.leave_out([self.down.shape], self.routing.choices)
        return sum_rows(self.down.forward(self.a, self.low, self.routing), self.routing, self.weights)


@dataclass(frozen=True, eq=False)
class _Layer:
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
    def of(cls, tensors: Sequence[Tensor | None], settings: ExpertSettings, which: int) -> _Layer:
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
