"""A vocabulary for tests."""
