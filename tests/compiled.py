"""What compilers make is made once, and kept for later sessions by all that decides it.

The C kernels take seconds for each of their flags, and tests ask for a dozen. What decides them are
the sources, the words of the command, the compiler's version, size and date, and this CPU's
instructions (`-march=native`). Of the kernels for GPUs, facts about binaries are kept. ccache would
do the first, but is a package of the system, which a fresh clone does not have.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fp8_numerics.kernels.compile import INCLUDED, SOURCE

ROOT = Path(__file__).parents[1]
FOLDER = (ROOT if os.access(ROOT, os.W_OK) else Path(tempfile.mkdtemp())) / "build" / "compiled"
KEPT = {"code": 64, "facts": 2048}
"""The numbers of results that stay: those that were used last."""

SCRIPT = """#!/bin/sh
case " $* " in *" {source} "*) ;; *) exec {compiler} "$@";; esac
for word; do
    if [ "$before" = -o ]; then output=$word; else words="$words $word"; fi
    before=$word
done
key=$({{
    echo "$words"; {compiler} --version | sed "1s/^[^ ]* //"; stat -L -c "%s %Y" {compiler}
    grep -m 1 -i -E "^(flags|features)" /proc/cpuinfo 2> /dev/null; cat {sources}
}} | sha256sum | cut -c 1-32)
[ -n "$key" ] || exec {compiler} "$@"
made={folder}/$key
if [ ! -f "$made" ]; then
    {compiler} "$@" 2> "$made.$$.err" || {{ cat "$made.$$.err" >&2; rm "$made.$$.err"; exit 1; }}
    cp "$output" "$made.$$" && mv "$made.$$.err" "$made.err" && mv "$made.$$" "$made"
fi
touch "$made" "$made.err"
cat "$made.err" >&2
cp "$made" "$output"
"""


def compiler(name: str, folder: Path, kept: Path = FOLDER / "code") -> Path:
    """Write the compiler that stands for `name` into `folder`, and return its path."""
    found = shutil.which(name)
    assert found is not None, name
    drop_old(kept, 2 * KEPT["code"])
    sources = " ".join(map(str, (SOURCE, *INCLUDED)))
    path = folder / f"{Path(name).name}-once"
    path.write_text(SCRIPT.format(compiler=found, source=SOURCE, sources=sources, folder=kept))
    path.chmod(0o755)
    return path


def facts_of(decided_by: Iterable[bytes], find: Callable[[], Any]) -> Any:
    """Return what `find` returned when it was asked first about the same, as JSON has it."""
    key = hashlib.sha256()
    for part in decided_by:
        key.update(b"%d " % len(part) + part)
    path = FOLDER / "facts" / f"{key.hexdigest()[:32]}.json"
    if path.exists():
        path.touch()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(find()))
        own.replace(path)
    return json.loads(path.read_text())


def drop_old(folder: Path, kept: int) -> None:
    """Remove the files of a folder, which is made if needed, but for those that were used last."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)[:-kept]:
        old.unlink(missing_ok=True)
