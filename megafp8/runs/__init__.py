"""Manage run directories: which process uses one, and the files in it other than checkpoints."""
