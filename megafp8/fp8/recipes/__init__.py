"""Define the built-in FP8 recipes, each in one file with its traits and its rule."""
