"""Modules that mix tokens by something else than attention: packed where kernels know boundaries, else on rows."""
