"""Recognise a model, plan what to replace, apply and undo it, and report what it does."""
