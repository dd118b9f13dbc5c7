"""Check what the threads that verify checkpoints leave in a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from megafp8.checkpoint import store
from megafp8.checkpoint.manifest import Placement
from tests.ranks import ROOT

THREADS, MIB = 8, 1 << 20
VERIFY = """
import re, sys, threading
from pathlib import Path
from megafp8.checkpoint.verify import verify
from megafp8.ops.memory import keep_freed_memory

def anonymous():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def one():
    verify(Path(sys.argv[1]))
    all_have_read.wait()
    may_end.wait()

keep_freed_memory()
verify(Path(sys.argv[1]))
all_have_read, may_end = (threading.Barrier(int(sys.argv[2]) + 1) for _ in range(2))
before = anonymous()
for _ in range(int(sys.argv[2])):
    threading.Thread(target=one).start()
all_have_read.wait()
print(anonymous() - before)
may_end.wait()
"""


def test_threads_that_verify_keep_no_buffers(tmp_path: Path) -> None:
    """Each thread takes memory from a part of the C library's heap that is its own, and freed
    memory stays there. A buffer of 4 MiB for each made a rank grow by 12 % in 400 steps."""
    staging = store.begin(tmp_path, 1)
    piece = Placement("x", (2 * MIB,), (0,), torch.zeros(2 * MIB))
    shard = store.write_shard(staging, "a.safetensors", [piece])
    saved = store.commit(staging, tmp_path, 1, [shard], {})
    words = [sys.executable, "-c", VERIFY, str(saved), str(THREADS)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < THREADS * MIB
