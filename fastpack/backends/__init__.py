"""The attention backends, one file for each source of kernels; :mod:`fastpack.attention_dispatch` picks one."""
