"""``fastpack bench``: real tokens a second of a training run, each variant in a process of its own.

``variants`` lists the variants, ``models`` builds the models, ``lengths`` draws the row lengths, and ``loops`` trains.
``variant_run`` trains one variant and prints its results. ``runner`` runs several in turn, and ``same_losses`` checks
that they train the same model. ``flops`` and ``ceiling`` compute the machine's limit; ``table`` and ``plot`` show the
results. ``ops`` times each op by itself. ``NOTES.md`` has predictions and measurements.
"""
