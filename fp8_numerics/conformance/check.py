"""Compare an implementation of FP8 and FP4 with the vectors; this file needs numpy alone.

python -m fp8_numerics.conformance.check IMPLEMENTATION.py

The implementation has a function `run(case, tensors)`. `case` is an entry of vectors/cases.json, a
dict with the name of a rule; `tensors` are numpy arrays: the matrix `x`, and what else the case
gives (`random`, `amaxes`). It returns a dict of arrays with the names that the README lists, or
None for a case that it does not have. What it returns is compared bit for bit; all codes of a NaN
are one.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).with_name("vectors")
GIVEN = ("random", "amaxes")
TYPES = {"F32": np.float32, "U8": np.uint8}
SEVERAL_NANS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "e4m3": lambda code: code & 127 == 127,
    "e5m2": lambda code: code & 127 > 124,
}
"""Whether codes are NaN, in the formats with more than one of them."""
Arrays = dict[str, np.ndarray]
Run = Callable[[dict[str, Any], Arrays], Arrays | None]


def read(file: Path) -> Arrays:
    """Return the tensors of a safetensors file of FP32 and bytes."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + size + at for at in entry["data_offsets"])
            flat = np.frombuffer(content[begin:end], TYPES[entry["dtype"]])
            found[name] = flat.reshape(entry["shape"])
    return found


def difference(case: dict[str, Any], name: str, wanted: np.ndarray, got: np.ndarray) -> str:
    """Return what differs between two arrays of a case, or an empty text."""
    got = np.asarray(got)
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"{name}: {got.dtype}{list(got.shape)} and not {wanted.dtype}{list(wanted.shape)}"
    same = got == wanted
    if wanted.dtype == np.float32:
        same = got.view(np.uint32) == wanted.view(np.uint32)
    elif name == "codes" and (is_nan := SEVERAL_NANS.get(case["format"])):
        same |= is_nan(got) & is_nan(wanted)
    if same.all():
        return ""
    at = tuple(int(i) for i in np.argwhere(~same)[0])
    count = f"{int((~same).sum())} of {same.size} differ"
    return f"{name}: {count}, first at {list(at)}: {got[at]} and not {wanted[at]}"


def check(run: Run, folder: Path = FOLDER) -> tuple[Counter[str], list[str]]:
    """Return how many cases of each rule agree or were left out, and what differs elsewhere."""
    tensors = read(folder / "vectors.safetensors")
    counts: Counter[str] = Counter()
    wrong = []
    for case in json.loads((folder / "cases.json").read_text()):
        prefix = case["case"] + "/"
        own = {key[len(prefix) :]: x for key, x in tensors.items() if key.startswith(prefix)}
        given = {key: own.pop(key) for key in GIVEN if key in own}
        if "input" in case:
            given["x"] = tensors["input/" + case["input"]]
        got = run(case, {key: x.copy() for key, x in given.items()})
        if got is None:
            counts[f"{case['rule']}: left out"] += 1
            continue
        missing = sorted(own.keys() - got.keys())
        found = [f"{key}: missing" for key in missing]
        found += [difference(case, key, x, got[key]) for key, x in own.items() if key in got]
        found = [text for text in found if text]
        counts[f"{case['rule']}: {'different' if found else 'the same'}"] += 1
        wrong += [f"{json.dumps(case)}: {text}" for text in found]
    return counts, wrong


def main(argv: list[str]) -> int:
    """Check the implementation in a file; return 1 if it differs, 2 if there is none."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python -m fp8_numerics.conformance.check IMPLEMENTATION.py", file=sys.stderr)
        return 2
    if not Path(argv[0]).is_file():
        print(f"error: {argv[0]}: there is no such file", file=sys.stderr)
        return 2
    spec = importlib.util.spec_from_file_location("implementation", argv[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, "run", None)):
        print(f"error: {argv[0]}: has no function run(case, tensors)", file=sys.stderr)
        return 2
    counts, wrong = check(module.run)
    print("\n".join([*wrong, *(f"{what}: {number}" for what, number in sorted(counts.items()))]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
