"""``fastpack bench``: real tokens a second of a training run, each variant in a process of its own.

``variants`` says who takes part, ``models`` what is trained, ``lengths`` how long rows are, ``loops`` how.
``variant_run`` trains one and prints its results; ``runner`` runs several in turn, ``same_losses`` asks whether they
trained the same model, ``flops`` and ``ceiling`` say what the machine would allow, ``table`` and ``plot`` show it.
``ops`` times each op by itself. Predictions and measurements are kept in ``NOTES.md``.
"""
