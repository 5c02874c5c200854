"""Linear projections with dense or 4-bit weights, LoRA, and whole gated MLPs."""
