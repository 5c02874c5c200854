"""Every causal-LM family of transformers, tiny: what a sweep over all of them is run on."""
