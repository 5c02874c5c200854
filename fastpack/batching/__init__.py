"""Making batches for a patched model."""

from fastpack.batching.collators import with_packed_seq_lens

__all__ = ["with_packed_seq_lens"]
