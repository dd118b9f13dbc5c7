"""Choose and run who computes the layers: our own FP8 linears, Transformer Engine or torchao.

Transformer Engine is imported in the folder `te/` alone and torchao in `torchao.py` alone, and only
where they were chosen.
"""
