"""Choose and run who computes the layers: our own FP8 linears, Transformer Engine or torchao.

Either package is imported in its own folder only (`te/`, `torchao/`), and only where it was chosen.
"""
