"""Tensor operations: one file each, which opens with its definition. Layers call these, so kernels are chosen here."""
