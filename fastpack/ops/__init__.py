"""One file an op, each with its definition in PyTorch first. Layers call these, so a kernel is swapped in here."""
