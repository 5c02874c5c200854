"""The GPU memory that training takes: a model's sizes, the terms of a step's peak, and the longest batch of a card."""
