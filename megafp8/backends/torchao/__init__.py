"""Replace linear layers with those of torchao."""
