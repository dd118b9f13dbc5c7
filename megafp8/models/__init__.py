"""A GPT, written once; what precision or parallelism may replace comes through `Parts`."""
