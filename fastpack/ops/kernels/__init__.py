"""Triton kernels and their launchers, a module an op; imported when first used."""
