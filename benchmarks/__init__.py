"""Measurements: `python -m benchmarks.compare` and, for one part at a time, the single programs (see README.md)."""
