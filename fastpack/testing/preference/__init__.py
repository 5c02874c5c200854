"""``python -m fastpack.testing.preference``: TRL's preference trainers, patched and stock, on the same pairs.

``cases`` says what is trained, ``judge`` when two runs are equal.
"""
