"""Reference log-probabilities of preference data: computed once, padding-free, and kept on disk.

::

    trainer = DPOTrainer(model, ref_model=reference, ...)       # or KTO's, or with LoRA and no ref_model
    fastpack.reference.precompute(trainer, folder="ref")        # its columns are there, the reference model is gone
    trainer.train()

    dataset = with_reference_log_probs(dataset, reference, folder="ref")  # for loops of one's own

The folder is a cache of one reference. A second run with the same model and data computes nothing; another model, or
examples that are not in it, are an error that says what differs. ``columns`` has the function, ``trainers`` the one for
TRL; ``identity`` says what a reference is told by, ``examples`` what a sequence is known by, ``cache`` what is on disk.
"""

from fastpack.errors import MissingReferenceError, ReferenceCacheError
from fastpack.reference.columns import with_reference_log_probs
from fastpack.reference.trainers import precompute

__all__ = ["MissingReferenceError", "ReferenceCacheError", "precompute", "with_reference_log_probs"]
