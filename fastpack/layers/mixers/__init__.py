"""Mixers: modules that mix tokens without attention. They run packed if a kernel knows boundaries, else as rows."""
