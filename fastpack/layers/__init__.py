"""The forwards that families share. Each is a module-level function that a patch binds to modules."""
