"""Compare what two versions of this repository compute: `python -m scripts.compare_trees BASE`."""
