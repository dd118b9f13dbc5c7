"""Ranks: starting them, the axes they form, what crosses between them."""
