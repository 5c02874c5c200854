"""``python -m fastpack.smoke.preference``: TRL's preference trainers, patched and stock, on the same pairs.

``cases`` says what is trained, ``figures`` what is kept of a run, ``judge`` when two runs are equal.
"""
