"""The families of models: a declarative row for each, and the hashes of the proved sources of their classes."""
