"""Run FP8 layers of other packages: Transformer Engine (`te*.py`) and torchao (`torchao*.py`).

Either package is imported only in its own files, and only where it was chosen.
"""
