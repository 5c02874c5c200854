"""``fastpack bench --ops``: each op by itself, against plain torch and Liger.

``case`` says what an op's entry in the benchmark is, the ``*_cases`` modules hold the entries, ``gate`` asks whether
results are exact enough, ``runner`` measures, ``table`` and ``plot`` show.
"""
