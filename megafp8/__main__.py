"""Run `python -m megafp8`, which is the command `megafp8`."""

import sys

from megafp8.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
