"""The script that compares our signatures with the declarations of Transformer Engine."""

from __future__ import annotations

import pytest

from scripts import te_bindings

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


def test_equal_declarations_have_no_difference() -> None:
    known = te_bindings.declared(BINDINGS, HEADER)
    assert known["quantize"].defaults == {"output", "noop"}
    assert known["fused_rope_forward"].names[-3:] == ("cu_seqlens", "cp_size", "cp_rank")
    assert te_bindings.differences("2.12", known) == []


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
def test_a_difference_is_found(before: str, after: str, word: str) -> None:
    known = te_bindings.declared(BINDINGS.replace(before, after), HEADER.replace(before, after))
    (found,) = te_bindings.differences("2.12", known)
    assert word in found


def test_a_member_that_is_missing_is_found() -> None:
    text = 'pybind11::enum_<DType>(m, "DType", local()).value("kFloat32", a).value("kNew", b);'
    assert te_bindings.enum_differences("2.12", text) == ["DType.kNew is missing"]
