"""Helpers that several parts use: torch's hooks, classes, signatures, sharded weights, the compiler and others."""
