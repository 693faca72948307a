"""Look into a model while it computes, and change what it computes: see `qkv.look.look` and `qkv.look.edits`."""

from qkv.look.edits import Edit, add, replace, silence
from qkv.look.look import Look
from qkv.look.statistics import Statistics

__all__ = ["Edit", "Look", "Statistics", "add", "replace", "silence"]
