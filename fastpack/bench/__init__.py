"""``fastpack bench``: measure the real tokens a second of training runs, each variant in its own process.

``variants`` lists the variants, ``models`` builds the models, ``lengths`` draws the row lengths, and ``loops`` trains.
``variant_run`` trains one variant and prints its results; ``unsloth_run`` and ``unsloth_model`` do so for Unsloth.
``runner`` runs several variants in turn, and ``same_losses`` checks that they train the same model. ``flops`` and
``ceiling`` compute the machine's limit; ``table`` and ``plot`` show the results. ``ops`` times each op by itself.
``NOTES.md`` has predictions and measurements.
"""
