"""What exact means, written once, and what it is tried on: models and callables. Nothing here knows of patching.

``rule.py`` says what a pass gives, how far two are apart and how far they may be. ``oracle.py`` runs a model on any
kind of batch (``inputs.py``) and on each sequence alone, for the sweep, for twins and for tests; ``choices.py`` holds
one pass to the experts that another chose; ``verification.py`` is the verdict.
``tiny.py`` makes small models of every family, with a row for what is special of each in ``special.py``; ``twins.py``
makes one of a user's own class and config. Where there is no copy in a finer dtype, as for a user's own model,
``runs.py`` compares passes of ``probe.py``, some of which differ in rounding alone.
"""
