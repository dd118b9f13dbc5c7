"""Show and record a run: the console, metrics.jsonl, trackers, and the summary at its end.

Nothing in this package may stop a training run: a full disk or a closed terminal costs the record,
not the run, and is reported once.
"""
