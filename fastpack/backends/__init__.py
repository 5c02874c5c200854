"""One file a source of attention kernels; the table is in :mod:`fastpack.attention_dispatch`."""
