"""The families of models: a row of facts for each, and the hashes of the proved sources of their classes."""
