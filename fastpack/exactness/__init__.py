"""What exact means, written once: the rule, and how choices and rounding are kept out of what it compares.

``rule.py`` says how far two passes are apart and how far they may be, ``choices.py`` holds one pass to the experts that
another chose, ``rounding.py`` runs a model again so that rounding alone differs. Nothing here knows of patching.
"""
