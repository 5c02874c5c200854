"""Sequence lengths of a batch: what they are, reading them from whatever a batch carries, prefixes in common."""
