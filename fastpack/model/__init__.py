"""A whole model's forward: un-pad or read the packing where the backbone is entered, run, put back; head and loss."""
