"""What exact means, written once, and what it is tried on: models and callables. Nothing here knows of patching.

``rule.py`` says how far two passes are apart and how far they may be, ``oracle.py`` how far any kind of batch
(``inputs.py``) is from each sequence alone, ``choices.py`` holds one pass to the experts that another chose.
``tiny.py`` makes small models of every family, with a row for what is special of each in ``special.py``; ``twins.py``
makes one of a user's own class and config. Where there is no copy in a finer dtype, as for a user's own model,
``runs.py`` compares passes of ``probe.py``, some of which differ in rounding alone.
"""
