"""A compiler that compiles the C kernels once for each of their sources, flags and compilers.

A compilation takes seconds, and tests ask for a dozen. What the compiler wrote is kept in
`build/compiled`, also for later sessions, by all that decides it: the sources, the words of the
command, the compiler's version, size and date, and this CPU's instructions (`-march=native`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from megafp8.fp8.kernels.compile import INCLUDED, SOURCE

FOLDER = Path(__file__).parents[1] / "build" / "compiled"
KEPT = 64
"""The number of results that stay: those that were used last."""

SCRIPT = """#!/bin/sh
case " $* " in *" {source} "*) ;; *) exec {compiler} "$@";; esac
for word; do
    if [ "$before" = -o ]; then output=$word; else words="$words $word"; fi
    before=$word
done
key=$({{
    echo "$words"; {compiler} --version; stat -L -c "%s %Y" {compiler}
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


def compiler(name: str, folder: Path, kept: Path = FOLDER) -> Path:
    """Write the compiler that stands for `name` into `folder`, and return its path."""
    found = shutil.which(name)
    assert found is not None, name
    kept.mkdir(parents=True, exist_ok=True)
    for old in sorted(kept.iterdir(), key=lambda file: file.stat().st_mtime)[: -2 * KEPT]:
        old.unlink(missing_ok=True)
    sources = " ".join(map(str, (SOURCE, *INCLUDED)))
    path = folder / f"{Path(name).name}-once"
    path.write_text(SCRIPT.format(compiler=found, source=SOURCE, sources=sources, folder=kept))
    path.chmod(0o755)
    return path
