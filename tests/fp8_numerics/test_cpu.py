"""Which CPUs have BF16 instructions, by what they say of themselves."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from fp8_numerics import cpu

X86 = "processor\t: {0}\nmodel name\t: AMD bf16 lookalike\nflags\t\t: fpu avx2 {1}\n\n"
ARM = "processor\t: {0}\nFeatures\t: fp asimd {1}\nCPU implementer\t: 0x41\n\n"


def both(form: str, first: str, second: str) -> str:
    return form.format(0, first) + form.format(1, second)


@pytest.mark.parametrize(
    ("cpuinfo", "is_fast"),
    [
        (both(X86, "", ""), False),
        (both(X86, "avx512f avx512_vnni", "avx512f avx512_vnni"), False),
        (both(X86, "avx512_bf16", "avx512_bf16"), True),
        (both(X86, "amx_tile amx_bf16", "amx_tile amx_bf16"), True),
        (both(ARM, "", ""), False),
        (both(ARM, "i8mm bf16", "i8mm bf16"), True),
        (both(ARM, "i8mm bf16", "i8mm"), False),  # a core without them may get the thread
    ],
)
def test_flags_of_every_core_decide(cpuinfo: str, is_fast: bool) -> None:
    flags = cpu.cpu_flags(cpuinfo)
    assert flags is not None and bool(flags & cpu.BF16_FLAGS) == is_fast


def test_a_file_without_flags_tells_nothing() -> None:
    assert cpu.cpu_flags("processor : 0\n") is None


@pytest.mark.parametrize(("flags", "expected"), [("avx2", "False"), ("avx2 amx_bf16", "True")])
def test_another_cpu_is_imitated_and_no_torch_is_read(flags: str, expected: str) -> None:
    code = (
        "import sys; from fp8_numerics import cpu; print(cpu.FAST_AT_BF16, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, cpu.IMITATED: flags},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [expected, "False"]


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({}, None),
        ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, "ONEDNN_MAX_CPU_ISA=AVX2"),
        ({"ONEDNN_MAX_CPU_ISA": "avx512_core"}, "ONEDNN_MAX_CPU_ISA=avx512_core"),
        ({"DNNL_MAX_CPU_ISA": "SSE41"}, "DNNL_MAX_CPU_ISA=SSE41"),
        ({"ONEDNN_MAX_CPU_ISA": "", "DNNL_MAX_CPU_ISA": "AVX"}, "DNNL_MAX_CPU_ISA=AVX"),
        ({"ONEDNN_MAX_CPU_ISA": "ALL", "DNNL_MAX_CPU_ISA": "AVX2"}, None),  # the first one counts
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, None),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, None),
        ({"ONEDNN_MAX_CPU_ISA": "none such"}, None),  # oneDNN ignores it
        ({"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"}, None),
        ({"ONEDNN_MAX_CPU_ISA": "AVX2", cpu.IMITATED: "avx512_bf16"}, None),  # the imitation wins
    ],
)
def test_a_limit_of_onednn_is_read_as_onednn_reads_it(given: dict, limit: str | None) -> None:
    assert cpu.onednn_limit(given) == limit


@pytest.mark.parametrize(
    ("flags", "value", "has_amx"),
    [
        ("avx512_bf16 amx_bf16", "", True),
        ("avx512_bf16 amx_bf16", "AVX512_CORE_AMX", True),
        ("avx512_bf16 amx_bf16", "AVX512_CORE_BF16", False),
        ("avx512_bf16 amx_bf16", "AVX2", False),
        ("avx512_bf16", "", False),
    ],
)
def test_amx_needs_its_flag_and_no_limit(flags: str, value: str, has_amx: bool) -> None:
    assert cpu.has_amx(frozenset(flags.split()), {"ONEDNN_MAX_CPU_ISA": value}) == has_amx


@pytest.mark.parametrize(
    ("flags", "limit", "is_fast"),
    [
        ("avx2 avx512_bf16 amx_bf16", None, True),
        ("avx2 avx512_bf16 amx_bf16", "ONEDNN_MAX_CPU_ISA=AVX2", False),
        ("i8mm bf16", "ONEDNN_MAX_CPU_ISA=AVX2", True),  # names of x86 say nothing of Arm
        ("avx2", None, False),
    ],
)
def test_a_limited_onednn_multiplies_bf16_slowly(
    flags: str, limit: str | None, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cpu.is_fast_at_bf16(frozenset(flags.split()), limit) == is_fast
    monkeypatch.setattr(cpu, "FLAGS", frozenset(flags.split()))
    monkeypatch.setattr(cpu, "LIMIT", limit)
    if limit and not is_fast:
        expected = "ONEDNN_MAX_CPU_ISA=AVX2 keeps oneDNN from this CPU's BF16 instructions"
        assert cpu.why_slow_at_bf16() == expected


def test_products_follow_the_limit_of_the_process() -> None:
    """The variable is read when the module is, and decides unless flags are imitated."""
    code = "from fp8_numerics import cpu; print(cpu.LIMIT, cpu.FAST_AT_BF16)"
    unset = {cpu.IMITATED, *cpu.ONEDNN_LIMITS}
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "ONEDNN_MAX_CPU_ISA": "SSE41"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[0] == "ONEDNN_MAX_CPU_ISA=SSE41"
    if platform.machine() == "x86_64":
        assert done.stdout.split()[1] == "False"


def test_the_reason_says_whether_flags_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "LIMIT", None)
    monkeypatch.setattr(cpu, "FLAGS", frozenset({"avx2"}))
    assert cpu.why_slow_at_bf16() == "this CPU has no BF16 instructions"
    monkeypatch.setattr(cpu, "FLAGS", None)
    assert cpu.why_slow_at_bf16().startswith("which instructions this CPU has cannot be read on ")
