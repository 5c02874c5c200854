"""Blocks of experts: routing, grouped matmuls, gated units, and the autograd Function that joins them."""
