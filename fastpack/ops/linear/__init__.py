"""Projections: products with weights of any kind, LoRA over them, and whole MLPs of them."""
