"""The families of models: one declarative row each, and what is known of the sources of its classes."""
