"""Read a batch outside a compiled region. Only tracing code imports this module, since it imports the compiler."""

from __future__ import annotations

import torch

from fastpack.packing.reading import numbers_segments, read_inputs

read_outside = torch.compiler.disable(
    read_inputs,
    reason="the host has to read where the sequences of this batch begin and end. For fullgraph=True pass a "
    "fastpack.PackedSeqLens as packed_seq_lens, built in the collator and on the model's device",
)
"""Read the batch with one graph break a step."""

numbers_segments_outside = torch.compiler.disable(
    numbers_segments,
    reason="the host has to read whether attention_mask numbers several sequences in one row, since the stock forward "
    "would not tell them apart. For fullgraph=True pass attention_mask as bools, or use_cache=False",
)
"""Read the mask with a graph break, if the stock forward runs."""
