"""Run `python -m te_cpu run …`, `… doctor`, or `… [VERSION …]`, which fills the cache."""

import sys

from te_cpu import doctor, run, wheel

commands = {"run": run.main, "doctor": doctor.main}
words = sys.argv[1:]
command = commands.get(words[0]) if words else None
sys.exit(wheel.main(words) if command is None else command(words[1:]))
