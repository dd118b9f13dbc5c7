"""Compare the functions of the CPU emulation with Transformer Engine's own declarations.

    git clone --filter=blob:none https://github.com/NVIDIA/TransformerEngine DIR
    python scripts/te_bindings.py DIR 2.4 2.12 2.18

The program reads, at the tags of those versions, what C++ declares to Python (`pybind.cpp`,
`pybind_helper.h`) and, where that names no arguments, the C++ declarations (HEADERS). It
prints each difference in names, order, defaults or number, and exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import inspect
import re
import subprocess
from dataclasses import dataclass

from te_cpu import enums
from te_cpu.extension import kernels

PYBIND = "transformer_engine/pytorch/csrc/extensions/pybind.cpp"
HELPER = "transformer_engine/common/util/pybind_helper.h"
HEADERS = (
    "transformer_engine/pytorch/csrc/extensions.h",
    "transformer_engine/common/include/transformer_engine/gemm.h",
)


@dataclass(frozen=True)
class Declared:
    """Hold a function's arguments: names in order, and which of them have a default.

    `positional` says that the names are C++'s own, and that Python passes arguments by position.
    """

    names: tuple[str, ...]
    defaults: frozenset[str]
    positional: bool


def source(repository: str, version: str, path: str) -> str:
    """Return a file of the repository at the tag of `version`."""
    command = ["git", "-C", repository, "show", f"v{version}:{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def balanced(text: str, start: int) -> str:
    """Return the text between the parenthesis at `start` and the one that closes it."""
    depth = 0
    for end in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + 1 : end]
    raise ValueError("a parenthesis is not closed")


def declared(text: str, header: str) -> dict[str, Declared]:
    """Return the declared functions by Python name, from `m.def("name", &function, …)`."""
    found = {}
    for match in re.finditer(r"m\.def\(\s*\"(\w+)\"", text):
        body = balanced(text, text.index("(", match.start()))
        arguments = re.findall(r'py::arg\(\s*"(\w+)"\s*\)\s*(=?)', body)
        if arguments:
            names = tuple(name for name, _ in arguments)
            defaults = frozenset(name for name, equals in arguments if equals)
            found[match[1]] = Declared(names, defaults, positional=False)
        elif function := re.search(r'"\w+",\s*&?\s*([\w:]+)', body):
            found[match[1]] = Declared(
                parameters(function[1].split("::")[-1], header), frozenset(), positional=True
            )
    return found


def parameters(function: str, header: str) -> tuple[str, ...]:
    """Return the names of the arguments of a C++ function, without types."""
    match = re.search(rf"\b{function}\(", header)
    if match is None:
        return ()
    body = balanced(header, match.end() - 1)
    parts, depth, part = [], 0, ""
    for letter in body:
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += letter
    names = [re.sub(r"=.*", "", p).split() for p in [*parts, part] if p.strip()]
    return tuple(words[-1].lstrip("&*") for words in names)


def differences(version: str, known: dict[str, Declared]) -> list[str]:
    """Return the differences of the emulation's functions that this version declares."""
    numbers = tuple(int(number) for number in version.split(".")[:2])
    found = []
    for name, kernel in sorted(kernels(numbers).items()):
        wanted = known.get(name)
        if wanted is None:
            continue  # another version has it, or this one calls the library in another way
        ours = inspect.signature(kernel).parameters
        names = tuple(ours)
        defaults = {p.name for p in ours.values() if p.default is not inspect.Parameter.empty}
        if wanted.positional and len(names) != len(wanted.names):
            found.append(f"{name}: {len(names)} arguments, declared {wanted.names}")
        elif not wanted.positional and names[: len(wanted.names)] != wanted.names:
            found.append(f"{name}: {names}, declared {wanted.names}")
        elif not wanted.positional and not wanted.defaults <= defaults:
            found.append(f"{name}: no default for {sorted(wanted.defaults - defaults)}")
        else:
            extra = [n for n in names[len(wanted.names) :] if n not in defaults]
            found += [f"{name}: {n} is not declared" for n in extra]
    return found


def enum_differences(version: str, text: str) -> list[str]:
    """Return the members that C++ declares and the emulation's enumeration lacks."""
    numbers = tuple(int(number) for number in version.split(".")[:2])
    ours, found = enums.enumerations(numbers), []
    for block in re.split(r"pybind11::enum_<|py::enum_<", text)[1:]:
        name = re.search(r'\(m,\s*"(\w+)"', block)
        if name is None or name[1] not in ours:
            continue
        declaration = block.split(";")[0]
        members = {m.__name__ if callable(m) else m.name for m in ours[name[1]]}  # type: ignore[attr-defined]
        for member in re.findall(r'\.value\(\s*"(\w+)"', declaration):
            if member not in members:
                found.append(f"{name[1]}.{member} is missing")
    return found


def main() -> int:
    """Compare all versions on the command line; return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("repository")
    parser.add_argument("versions", nargs="+")
    given = parser.parse_args()
    status = 0
    for version in given.versions:
        text = source(given.repository, version, PYBIND)
        text += source(given.repository, version, HELPER)
        headers = "".join(source(given.repository, version, path) for path in HEADERS)
        known = declared(text, headers)
        found = differences(version, known) + enum_differences(version, text)
        shared = set(kernels(tuple(int(n) for n in version.split(".")[:2]))) & set(known)
        print(f"{version}: {len(shared)} functions compared, {len(found)} differences")
        print("".join(f"  {line}\n" for line in found), end="")
        status |= bool(found)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
