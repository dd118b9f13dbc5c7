"""How a linear's tensors are quantized: one file a recipe, one class in it for one tensor."""
