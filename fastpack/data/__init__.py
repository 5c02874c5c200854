"""Making batches for a patched model.

``packed_collators`` has collators for loops of one's own, ``token_budget`` plans batches of as many tokens as fit and
``sampler`` hands them out; what imports fastpack alone does not pay for importing them.
"""

from fastpack.data.collators import with_packed_seq_lens

__all__ = ["with_packed_seq_lens"]
