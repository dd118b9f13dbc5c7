"""Load Transformer Engine in a process that a program spawns, and then the program's own file.

`multiprocessing` runs this module in place of the program's main module; see `run.py`.
"""

import json
import os
import runpy

from te_cpu import cuda
from te_cpu.loading import load
from te_cpu.run import MAIN

if __name__ == "__mp_main__":  # and not where the module is imported by its name
    described = json.loads(os.environ[MAIN])
    load(described["version"])
    cuda.answer_everyone()
    if described["module"] is None:
        globals().update(runpy.run_path(described["file"], run_name=__name__))
    elif not described["module"].endswith(".__main__"):  # as multiprocessing does
        again = runpy.run_module(described["module"], run_name=__name__, alter_sys=True)
        globals().update(again)
