"""The sweep over every causal-LM family of transformers, with tiny models."""
