"""Triton kernels and their launchers, one module for each op, imported when it is first used."""
