"""The script that compares our signatures with the declarations of Transformer Engine."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[3] / "scripts/te_bindings.py"
HEADER = """
at::Tensor scaled_softmax_forward(at::Tensor input, float scale_factor);
at::Tensor fused_rope_forward(const at::Tensor &input, const at::Tensor &freqs,
                              const std::optional<at::Tensor> start_positions,
                              const NVTE_QKV_Format qkv_format, const bool interleaved,
                              const std::optional<at::Tensor> cu_seqlens, const int cp_size,
                              const int cp_rank);
"""
BINDINGS = """
  m.def("gelu", pytorch::gelu, "GeLU activation", py::arg("input"), py::arg("quantizer"));
  m.def("quantize", pytorch::quantize, py::arg("tensor"), py::arg("quantizer"),
        py::arg("output") = py::none(), py::arg("noop") = py::none());
  m.def("scaled_softmax_forward", &pytorch::scaled_softmax_forward, "Scaled Softmax FWD",
        py::call_guard<py::gil_scoped_release>());
  m.def("fused_rope_forward", &pytorch::fused_rope_forward, "Fused Apply RoPE FWD");
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("te_bindings", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "te_bindings", module)
    spec.loader.exec_module(module)
    return module


def test_equal_declarations_have_no_difference(script: Any) -> None:
    known = script.declared(BINDINGS, HEADER)
    assert known["quantize"].defaults == {"output", "noop"}
    assert known["fused_rope_forward"].names[-3:] == ("cu_seqlens", "cp_size", "cp_rank")
    assert script.differences("2.12", known) == []


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ('py::arg("noop") =', 'py::arg("flag") =', "quantize"),
        ('py::arg("quantizer"));', 'py::arg("quantizer") = py::none());', "no default"),
        ('py::arg("input"), py', 'py::arg("x"), py', "gelu"),
        ("const int cp_size,", "", "fused_rope_forward: 8 arguments"),
        ("float scale_factor", "float scale_factor, bool causal", "scaled_softmax_forward"),
    ],
)
def test_a_difference_is_found(script: Any, before: str, after: str, word: str) -> None:
    known = script.declared(BINDINGS.replace(before, after), HEADER.replace(before, after))
    (found,) = script.differences("2.12", known)
    assert word in found


def test_a_member_that_is_missing_is_found(script: Any) -> None:
    text = 'pybind11::enum_<DType>(m, "DType", local()).value("kFloat32", a).value("kNew", b);'
    assert script.enum_differences("2.12", text) == ["DType.kNew is missing"]
