"""The forwards of a backbone and its head: un-pad a batch or read its packing, run, re-pad; and the loss."""
