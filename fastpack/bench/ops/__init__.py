"""``fastpack bench --ops``: each op by itself, against plain torch and Liger.

``case`` defines an op's entry in the benchmark, the ``*_cases`` modules hold the entries, and ``runner`` measures them
and prints tables. The tests check that they are exact.
"""
