"""Checkpoints and run directories: files, hashes, commits, resharding, locks. No communication."""
