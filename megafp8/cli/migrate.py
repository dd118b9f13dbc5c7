"""Run `python -m megafp8.cli.migrate`, the old name of `megafp8 migrate`."""

from megafp8.cli.commands import run_old_name

if __name__ == "__main__":
    run_old_name("migrate")
