"""A GPT, written once; everything that precision or parallelism may replace comes through `Parts`."""
