"""Manage what is on the disk beside a run's checkpoints, and which process works there."""
