"""Looking inside: what scaling, mask, values and heads do, computed on arrays or on a reference decoder.

Each topic is a module with the same three functions: `compute` gives a dataclass of arrays, `report` its text for a
terminal, `draw` its plot on a matplotlib figure.
"""
