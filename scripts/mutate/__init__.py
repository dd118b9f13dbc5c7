"""Change the code that handles FP8 in one place at a time, and see whether a test fails."""
