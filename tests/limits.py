"""Say when a test takes what it waits for to hang.

There is one limit, and no machine that other work keeps busy comes near it: the longest of these
waits takes some minutes on two cores that eight processes share. It ends before pytest's own limit
of a test (`timeout` in pyproject.toml), so that an error says what was waited for. What has no
limit of its own (`subprocess.run`, `Popen.wait`, a thread) is ended by pytest's.
"""

from __future__ import annotations

HANG_SECONDS = 1500.0
