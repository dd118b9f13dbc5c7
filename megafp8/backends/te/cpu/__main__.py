"""Put versions into the cache: `python -m megafp8.backends.te.cpu [VERSION …]`; see `wheel.py`."""

import sys

from megafp8.backends.te.cpu.wheel import main

sys.exit(main(sys.argv[1:]))
