"""The definition of exact, and the code that checks it on models and callables. Nothing here knows of patching.

- ``rule.py`` defines the result of a pass, the error of one pass against another, and the bound of this error.
- ``oracle.py`` runs a model on any kind of batch (``inputs.py``) and on each sequence alone, for the sweep over all
  families, for twins and for tests.
- ``runs.py`` compares passes of ``probe.py``, some of which differ in rounding alone. It is for a user's own
  model, which has no copy in a finer dtype.
- ``expert_choices.py`` makes one pass choose the experts that another pass chose.
- ``verification.py`` holds the checks and the verdict.
- ``tiny.py`` builds a small model of every family, with the family's own settings from ``family_settings.py``;
  ``twins.py`` builds one from a user's own class and config.
- ``image_text.py`` builds a small image-text model, with rows of text and images, by the tables of
  ``image_settings.py`` and the layouts of ``image_layouts.py``.
"""
