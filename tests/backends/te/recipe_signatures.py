"""Recipe classes with the fields of Transformer Engine's real ones, for each recorded version.

The signatures in te_signatures.json are parsed from the wheels, so that recipe objects of several
versions can be made in one process, without loading any. Everything else is tested over the real
classes, in `real_*.py`.
"""

from __future__ import annotations

import ast
import enum
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SIGNATURES: dict[str, dict[str, list[dict[str, Any]]]] = json.loads(
    Path(__file__).with_name("te_signatures.json").read_text("utf-8")
)
VERSIONS = tuple(SIGNATURES)


class Format(enum.Enum):
    """Largest numbers of (forward, backward)."""

    E4M3 = (448.0, 448.0)
    HYBRID = (448.0, 57344.0)


@dataclass(frozen=True)
class MMParams:
    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0


def _default(parameter: dict[str, Any]) -> Any:
    if "default" not in parameter:
        return None
    try:
        return ast.literal_eval(parameter["default"])
    except ValueError:
        return parameter["default"]  # an expression: as text


def recipe_classes(version: str) -> SimpleNamespace:
    """Recipe classes with the real fields, as careless as the real ones: they swallow the rest."""

    def make(name: str) -> type:
        fields = {p["name"]: _default(p) for p in SIGNATURES[version][name]}

        def init(self: Any, **given: Any) -> None:
            for key, default in fields.items():
                setattr(self, key, given.get(key, default))

        quantizers = {
            key: QParams() for key in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight",
                                       "fp8_quant_bwd_grad")
        }  # fmt: skip
        body = {"__init__": init, "__dataclass_fields__": fields, **quantizers}
        return type(name, (), body)

    names = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")
    there = {name: make(name) for name in names if name in SIGNATURES[version]}
    return SimpleNamespace(Format=Format, QParams=QParams, MMParams=MMParams, **there)
