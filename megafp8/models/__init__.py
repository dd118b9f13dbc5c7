"""This package holds one GPT; precision and parallelism replace its modules through `Parts`."""
