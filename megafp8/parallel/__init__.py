"""This package starts ranks, forms the mesh axes, and moves tensors between ranks."""
