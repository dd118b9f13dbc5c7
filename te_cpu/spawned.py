"""Load Transformer Engine in a process that a program spawns, and then the program's own file.

`multiprocessing` runs this module in place of the program's main module; see `run.py`.
"""

import json
import os
import runpy

from te_cpu import cuda
from te_cpu.loading import load
from te_cpu.run import MAIN

_described = json.loads(os.environ[MAIN])
load(_described["version"])
cuda.answer_everyone()
if _described["module"] is None:
    globals().update(runpy.run_path(_described["file"], run_name=__name__))
elif not _described["module"].endswith(".__main__"):  # as multiprocessing does
    globals().update(runpy.run_module(_described["module"], run_name=__name__, alter_sys=True))
