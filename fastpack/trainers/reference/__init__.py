"""Reference log-probabilities of preference data: computed once, padding-free, and kept on disk.

::

    trainer = DPOTrainer(model, ref_model=reference, ...)       # or KTO's, or with LoRA and no ref_model
    fastpack.reference.precompute(trainer, folder="ref")        # its columns are there, the reference model is gone
    trainer.train()

    dataset = with_reference_log_probs(dataset, reference, folder="ref")  # for loops of one's own

The folder is a cache of one reference. A second run with the same model and data computes nothing, examples that are
new are computed and added, and another model is an error that says what differs. ``columns`` has the two functions,
``compute`` asks the model, ``cache`` says what a reference is told by and what is on disk.
"""

from fastpack.errors import MissingReferenceError, ReferenceCacheError
from fastpack.trainers.reference.columns import precompute, with_reference_log_probs

__all__ = ["MissingReferenceError", "ReferenceCacheError", "precompute", "with_reference_log_probs"]
