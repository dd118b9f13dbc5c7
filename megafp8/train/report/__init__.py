"""Report about a run: its header, FP8 fraction and health, summary and profile."""
