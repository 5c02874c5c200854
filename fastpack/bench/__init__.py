"""``fastpack bench``: real tokens a second of a training run, each contestant in a process of its own.

``shapes`` names models, ``lengths`` says how long rows are, ``contestant`` trains one of them and prints figures,
``runner`` runs several in turn and prints the table.
"""
