"""TRL's preference trainers, patched and stock, on the same pairs: what is trained, and when two runs are equal."""
