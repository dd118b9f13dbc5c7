"""Sweeps and comparisons: a list of jobs, an outcome of each, one table and one page of all."""
