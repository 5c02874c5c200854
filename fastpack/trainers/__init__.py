"""Trainers that are already built: token budgets, and losses that mean the same whatever shares a micro-batch.

``kinds`` says of each of TRL's trainers what its loss is a mean of, ``loader`` puts token-budget batches in the place
of its own, ``steps`` weighs and splits micro-batches, ``budget`` plans all of it, sets it up and takes it off again.

Only attributes of one trainer instance (and of its accelerator) change; no class does.
"""
