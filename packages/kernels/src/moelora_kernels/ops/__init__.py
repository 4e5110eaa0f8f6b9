"""The operations, one folder each: `naive.py` is the truth, `kernel.py` the Triton code, `__init__.py` the launch."""
