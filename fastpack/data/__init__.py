"""Tools that make batches for a patched model.

``packed_collators`` has collators for your own training loop. ``token_budget`` plans batches that fill a budget of
tokens, and ``sampler`` yields these batches. They are imported only when they are used.
"""

from fastpack.data.collators import with_packed_seq_lens

__all__ = ["with_packed_seq_lens"]
