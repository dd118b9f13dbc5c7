"""Put versions into the cache: `python -m megafp8.te_cpu [VERSION …]`; see `wheel.py`."""

import sys

from megafp8.te_cpu.wheel import main

sys.exit(main(sys.argv[1:]))
