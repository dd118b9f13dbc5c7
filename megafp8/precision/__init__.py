"""Run linears in FP8: formats, scaling rules, casts, GEMMs and the one linear that uses them."""
