"""Write the conformance vectors from the specifications beside the tests.

python -m tests.spec.make_vectors

The arithmetic is that of tests/spec, slow and in numpy. The vectors of `fp8_numerics/conformance`
must not change unless a rule does;
tests/fp8_numerics/test_conformance.py makes them again and compares the bytes.
"""

# M rows   K elements along the sum   S steps   R ranks   T tensors

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from safetensors.numpy import save

from fp8_numerics.conformance.check import FOLDER
from tests.spec import current, delayed, formats, mxfp8, nvfp4
from tests.spec.data import data
from tests.spec.formats import FNUZ_FORMATS, FORMATS, Floats32

SHAPE = (32, 256)
WHOLE = (1 << 30, 1 << 30)
INPUTS = ("normal", "wide", "zeros", "subnormal", "tiny", "edges", "largest", "inf", "nan")
ODD = {"odd": (5, 200), "one": (1, 1), "empty": (0, 256)}
"""Shapes that are no whole blocks; the recipes with padded blocks do not have them."""
GROUPS: dict[str, tuple[tuple[int, int], current.Rule, bool]] = {
    "tensorwise": (WHOLE, "te", False),
    "tensorwise_power_2": (WHOLE, "te", True),
    "rowwise": ((1, WHOLE[1]), "torchao", True),
    "rowwise_with_gw_hp_weight": (WHOLE, "torchao", True),
    "blockwise": ((1, 128), "te", True),
    "blockwise_weight": ((128, 128), "te", True),
}
"""The elements that share a scale, whose rule it is, and whether scales are powers of two."""


def inputs() -> dict[str, Floats32]:
    """Return the matrices that are quantized; `fp32` and `fnuz` are not exact in BF16."""
    found = {kind: data(kind, SHAPE) for kind in INPUTS}
    found["fp32"] = np.random.default_rng(20261123).standard_normal(SHAPE).astype(np.float32)
    return found | {kind: data("normal", shape) for kind, shape in ODD.items()}


def ties() -> Floats32:
    """Return where the casts to AMD's formats change their code, and the numbers beside it."""
    found = []
    for fmt in FNUZ_FORMATS.values():
        grid = fmt.finite_magnitudes
        middle = ((grid[:-1] + grid[1:]) / 2).astype(np.float32)
        found += [
            middle,
            np.nextafter(middle, np.float32(0)),
            np.nextafter(middle, np.float32(9e9)),
        ]
    x = np.concatenate([*found, np.array([0, 2.0**-149, 240.1, 57345], dtype=np.float32)])
    return np.stack([x, -x])


def casts() -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Yield each cast: what is asked for, and the codes and scales that follow."""
    matrices = inputs()
    for kind, x in matrices.items():
        for rule, (group, whose, power_2) in GROUPS.items():
            for fmt in FORMATS if rule == "tensorwise" else ("e4m3",):
                made = current.quantize_groups(x, group, FORMATS[fmt], whose, power_2)
                small = _first_of_groups(made.dequant_scale, group)
                yield (
                    {"rule": rule, "input": kind, "format": fmt},
                    {
                        "codes": made.codes,
                        "dequant_scale": small,
                    },
                )
        for exponent in (-20, 0, 9):
            scale = np.float32(2.0**exponent * 1.5)
            for fmt in FORMATS:
                made_codes = formats.quantize(x, scale, FORMATS[fmt])
                case = {"rule": "delayed", "input": kind, "format": fmt, "scale": float(scale)}
                amax = np.array(delayed.amax_of(x))
                yield case, {"codes": made_codes, "amax": amax}
        if kind in ODD:
            continue
        micro = mxfp8.quantize_rows(x)
        yield (
            {"rule": "mxfp8", "input": kind, "format": "e4m3"},
            {
                "codes": micro.codes,
                "scale_codes": micro.scale_codes,
            },
        )
        generator = np.random.default_rng(7)
        for name, rows, byte in (
            ("nvfp4", 1, None),
            ("nvfp4_weight", 16, None),
            ("nvfp4_random", 1, generator.integers(0, 256, x.shape, dtype=np.uint8)),
        ):
            if kind in ("inf", "nan"):
                continue  # megafp8 makes the factor infinite, so that a NaN cannot be lost
            four = nvfp4.quantize_blocks(x, rows, byte=byte)
            tensors = {"codes": four.codes, "scale_codes": four.scale_codes}
            tensors["amax"] = np.array(four.amax, dtype=np.float32)
            if byte is not None:
                tensors["random"] = byte
            yield {"rule": name, "input": kind, "format": "e2m1"}, tensors


def _first_of_groups(scale: Floats32, group: tuple[int, int]) -> Floats32:
    """Return one scale a group of a matrix that repeats it for each element."""
    return np.ascontiguousarray(scale[:: group[0], :: group[1]])


def amds_casts() -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Yield the casts to AMD's formats, which have no recipe here: codes by a given scale."""
    given = {"fnuz": ties()} | inputs()
    for kind, scale in (
        *(("fnuz", 1.0), ("fp32", 50.0), ("wide", 1.5), ("zeros", 3.0), ("inf", 1.5), ("nan", 1.5)),
    ):
        for name, fmt in FNUZ_FORMATS.items():
            case = {"rule": "delayed", "input": kind, "format": name, "scale": scale}
            codes = formats.quantize(given[kind], np.float32(scale), fmt)
            yield case, {"codes": codes, "amax": np.array(delayed.amax_of(given[kind]))}


def histories() -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Yield what becomes of histories and scales when ranks agree on amaxes, step by step."""
    generator = np.random.default_rng(3)
    algos: tuple[delayed.Algo, ...] = ("max", "most_recent")
    for algo in algos:
        for length, margin in ((1, 0), (4, 0), (16, 2)):
            amaxes = (2.0 ** generator.integers(-30, 30, (24, 3, 5))).astype(np.float32)
            amaxes[3, :, 0], amaxes[5, 1, 1], amaxes[7, 2, 2] = 0.0, np.inf, np.nan
            amaxes[9, :, 3] = np.float32(2.0**-149)
            recorded = np.where(np.isfinite(amaxes), amaxes, np.float32(np.inf))
            agreed = recorded.max(axis=1)
            recipe = delayed.Recipe(margin=margin, amax_history_len=length, amax_compute_algo=algo)
            states = [
                delayed.TensorState("input", FORMATS["e4m3"], np.zeros(length, dtype=np.float32))
                for _ in range(5)
            ]
            all_scales, all_histories = [], []
            for step in agreed:
                for state, amax in zip(states, step, strict=True):
                    state.update(amax, recipe)
                all_scales.append([state.scale for state in states])
                all_histories.append([state.history[1:] for state in states])
            case = {"rule": "history", "algo": algo, "length": length, "margin": margin}
            yield (
                case,
                {
                    "amaxes": amaxes,
                    "agreed": agreed,
                    "quant_scale": np.array(all_scales, dtype=np.float32),
                    "history": np.array(all_histories, dtype=np.float32),
                },
            )


def files() -> dict[str, bytes]:
    """Return the bytes of each file of the vectors."""
    matrices = inputs() | {"fnuz": ties()}
    tensors: dict[str, np.ndarray] = {f"input/{kind}": x for kind, x in matrices.items()}
    cases = []
    for number, (case, expected) in enumerate((*casts(), *histories(), *amds_casts())):
        name = f"{number:03}"
        cases.append({"case": name, **case})
        tensors |= {f"{name}/{key}": value.copy(order="C") for key, value in expected.items()}
    text = "[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n"
    return {"vectors.safetensors": save(tensors), "cases.json": text.encode()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, content in files().items():
        (FOLDER / file).write_bytes(content)
        print(f"{FOLDER / file}: {len(content)} bytes")
