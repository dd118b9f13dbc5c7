"""What a run reports: its header, its FP8 share and health, its summary, its profile."""
