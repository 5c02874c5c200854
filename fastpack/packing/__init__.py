"""The lengths of a batch's sequences: a type that holds them, code that reads them, and the prefixes in common."""
