"""The forwards that families share. Each is a module-level function, bound to a module with ``functools.partial``."""
