"""Put versions into the cache: `python -m te_cpu [VERSION …]`; see `wheel.py`."""

import sys

from te_cpu.wheel import main

sys.exit(main(sys.argv[1:]))
