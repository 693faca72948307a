"""Looking inside: what scaling, mask, values and heads do, computed on arrays or on a reference decoder.

Each topic is a module with the same three functions: `compute` gives arrays, `report` a text for a terminal from them
and the name of what was looked at, `draw` a plot on a matplotlib figure.
"""
