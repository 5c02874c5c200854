"""``fastpack bench --ops``: each op by itself, against plain torch and Liger.

``case`` says what an op's entry in the benchmark is, the ``*_cases`` modules hold the entries, ``runner``
measures and shows. Whether they are exact, the tests say.
"""
