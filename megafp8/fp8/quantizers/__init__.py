"""Quantize a linear's tensors: one file per recipe, with one class for one tensor."""
