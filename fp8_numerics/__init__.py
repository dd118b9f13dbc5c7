"""Cast tensors to FP8 and FP4, and compute with them, with the same bits on every device."""
