"""Run `python -m megafp8.cli.migrate`, the old name of `megafp8 migrate`."""

from megafp8.cli.commands import run_old_name

run_old_name("migrate")
