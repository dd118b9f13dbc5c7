"""Build a model of the layers of Transformer Engine, on a GPU or on a CPU."""
