"""Run `python -m megafp8.cli.migrate`."""

import sys

from megafp8.cli.migrate import main

sys.exit(main(sys.argv[1:]))
