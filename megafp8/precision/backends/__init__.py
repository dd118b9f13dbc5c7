"""Other engines for FP8 layers: Transformer Engine (`te*.py`) and torchao (`torchao*.py`).

Either package is imported only in its own files and only where it was chosen.
"""
