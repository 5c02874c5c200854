"""Helpers that every part needs and none owns: torch's hooks, classes, signatures, sharded weights, the compiler."""
