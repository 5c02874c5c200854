"""Making batches for a patched model.

``packed`` has collators for loops of one's own, ``budget`` plans batches of as many tokens as fit and
``budget_sampler`` hands them out; what imports fastpack alone does not pay for importing them.
"""

from fastpack.data.collators import with_packed_seq_lens

__all__ = ["with_packed_seq_lens"]
