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

Shape suffixes: T tokens, K choices of a token, E experts, R rows, at most T K, H hidden size, I size inside, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastpack.ops.autograd import differentiable_once, is_last_pass, without_memory
from fastpack.ops.expert_operands import Gate, Routing, Stack
from fastpack.ops.experts.gate import gate_backward, gate_forward
from fastpack.ops.experts.grouped_matmul import grouped_matmul, kernel_rejects
from fastpack.ops.experts.layer import ExpertLayer, ExpertLinear, ExpertSettings
from fastpack.ops.experts.routing import gather_rows, route, row_weights, sum_rows
from fastpack.ops.implementation import Implementation, kernel_serves, use_triton
from fastpack.ops.row_count import RowCount


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
        index: ``[T, K]`` of int64 or int32, the chosen experts. A choice of E or more, or a negative one, adds nothing.
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

    def through(self, function: Callable[[Tensor], Tensor]) -> Unfinished:
        """Return the block with a stand-in that went through a function; finishing passes its gradient on."""
        return Unfinished(function(self.stand_in), self.inputs)

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
        inner, down = (ExpertLayer.of(tensors[4 * i : 4 * i + 4], settings, i) for i in (0, 1))
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
        inner, down = (ExpertLayer.of(tensors[4 * i : 4 * i + 4], settings, i) for i in (0, 1))
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
        low: ``[R, r]``, the result of :meth:`ExpertLayer.shrink` for it, or None.
        weights: ``[T, K]``, the weights of the chosen experts.
        down: the last layer.
        routing: the rows.
    """

    a: Tensor
    low: Tensor | None
    weights: Tensor
    down: ExpertLayer
    routing: Routing

    def finish(self) -> Tensor:
        """Return the block's result ``[T, H]``."""
        self.down.settings.leave_out([self.down.shape], self.routing.choices)
        return sum_rows(self.down.forward(self.a, self.low, self.routing), self.routing, self.weights)
