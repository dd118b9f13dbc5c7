"""What ran in FP8 is said of any torch program, and what cannot be known is said to be unknown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fp8_coverage import Coverage, CoverageError, Product, coverage, trainer_callback
from fp8_coverage.__main__ import main
from fp8_coverage.flops import FLOPS
from fp8_numerics.gemm import GemmCounter
from te_cpu.versions import DEFAULT_VERSION
from tests.coverage_tool import models
from tests.te_sources import need_sources
from tests.test_layers import ROOT
from tests.train.runs import Driver

pytestmark = pytest.mark.filterwarnings("ignore")


def products(c: Any) -> dict[tuple[str, bool, str], int]:
    """Return the FLOPs by module, pass and kind."""
    found: dict[tuple[str, bool, str], int] = {}
    for p, (_, flops) in c.products.items():
        key = (p.module, p.is_backward, p.kind)
        found[key] = found.get(key, 0) + flops
    return found


@pytest.mark.parametrize("name", models.HEALTHY)
def test_a_healthy_model_is_not_flagged(name: str) -> None:
    if "Llama" in name or "Mistral" in name or "by torchao" in name:
        pytest.importorskip("torchao" if "torchao" in name else "transformers")
    model, run, step = models.healthy(name)
    least = 0.4 if name.startswith("nn.") else 0.85  # nn.MultiheadAttention reads its own weights
    with step, coverage(model) as c:
        run().backward()
    c.assert_at_least(least)
    assert c.not_known == [] and c.never_ran == []
    assert c.flops("asked for and not in FP8") == 0


def test_recording_changes_no_bit() -> None:
    grads = []
    for recorded in (False, True):
        torch.manual_seed(1)
        model, run, step = models.healthy("Llama by fp8.convert, rowwise")
        with step:
            if recorded:
                with coverage(model):
                    run().backward()
            else:
                run().backward()
        grads.append([p.grad for p in model.parameters()])
    for plain, seen in zip(*grads, strict=True):
        assert (plain is None) == (seen is None)
        assert plain is None or torch.equal(plain, seen)


class Experts(nn.Module):
    """Fused experts, as torchtitan's `GroupedExperts` and the `experts` of transformers."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(2, 32, 64, dtype=dtype))
        self.w2 = nn.Parameter(torch.randn(2, 64, 32, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([8, 16], dtype=torch.int32)
        return F.grouped_mm(F.grouped_mm(x, self.w1, offs=ends).relu(), self.w2, offs=ends)


class Layer(nn.Module):
    """A projection and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.proj(x))


def step(model: nn.Module) -> None:
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    model(x).square().sum().backward()


@pytest.mark.parametrize("config", ["MXFP8TrainingOpConfig", "Float8TrainingOpConfig"])
def test_a_converter_whose_filter_passes_over_experts_is_flagged(config: str) -> None:
    """torchtitan PR 3199 (MXFP8) and PR 3233 (FP8): `quantize_` looks at nn.Linear alone."""
    configs = pytest.importorskip("torchao.prototype.moe_training.config")
    from torchao.quantization import quantize_

    experts = nn.Sequential(Experts())
    quantize_(experts, getattr(configs, config)())
    with coverage(experts, asked="0") as c:
        step(experts)
    with pytest.raises(CoverageError, match=r"0\.0% of .*\(asked for and not in FP8, 100"):
        c.assert_at_least(0.85)


def test_experts_that_are_parameters_are_flagged() -> None:
    """transformers PR 42654: what replaces modules leaves `gate_up_proj` and `down_proj`."""
    pytest.importorskip("torchao")
    model = models.by_torchao(models.of_transformers("Mixtral", num_local_experts=4), emulate=True)
    with coverage(model, asked="model.layers.*") as c:
        models.loss_of(model).backward()
    with pytest.raises(CoverageError, match=r"model\.layers\.\*\.mlp\.experts"):
        c.assert_at_least(0.85)
    assert c.flops("in FP8") > 0


@pytest.mark.parametrize("asked", [(), ("*",)])
def test_a_setting_that_nothing_reads_is_flagged(asked: tuple[str, ...]) -> None:
    """LlamaFactory#9500: `fp8: true` came to the environment after it had been read."""
    model = models.of_transformers("Qwen2")
    with coverage(model, asked=asked) as c, torch.autocast("cpu", torch.bfloat16):
        models.loss_of(model).backward()
    with pytest.raises(CoverageError, match=r"0\.0% of the FLOPs ran in FP8"):
        c.assert_at_least(0.85)
    state = "asked for and not in FP8" if asked else "never asked for"
    assert {p.state for p in c.products} == {state}


def test_a_preparation_that_returns_early_is_flagged() -> None:
    """Accelerate: a model that counts as prepared is returned before it is converted."""
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("torchao")
    model = models.of_transformers("Llama")
    model._is_accelerate_prepared = True  # type: ignore[assignment]
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.prepare_model(model) is model
    with coverage(model, asked="model") as c:
        models.loss_of(model).backward()
    with pytest.raises(CoverageError, match="asked for and not in FP8"):
        c.assert_at_least(0.85)


def test_layers_that_were_to_stay_out_of_fp8_are_flagged() -> None:
    """Megatron-Bridge PR 3095: a preset erased which layers a recipe keeps in BF16."""
    from megafp8 import fp8

    for skip, kept in (("0.*", True), ((), False)):
        model = nn.Sequential(models.mlp(), models.mlp())
        state = fp8.convert(model, recipe="tensorwise", skip=skip)
        with state.microbatch(), coverage(model) as c:
            model(torch.randn(16, models.WIDTH)).sum().backward()
        if kept:
            c.assert_kept("0", "0.*")
            with pytest.raises(CoverageError, match="was to stay out of FP8: 1"):
                c.assert_kept("1.*")
        else:
            with pytest.raises(CoverageError, match=r"0 was to stay out of FP8: 0\.0"):
                c.assert_kept("0")
    with pytest.raises(CoverageError, match="no product of such a module"):
        c.assert_kept("nowhere")


def test_weights_that_are_read_past_their_module_are_flagged() -> None:
    from megafp8 import fp8

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.o = (nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            both = F.linear(x, torch.cat([self.q.weight, self.k.weight]))
            return self.o(both[..., :64] + both[..., 64:])

    model = Fused()
    state = fp8.convert(model, recipe="tensorwise")
    with coverage(model) as c, state.evaluation(), torch.no_grad():
        model(torch.randn(16, 64))
    assert c.share == pytest.approx(1 / 3) and c.never_ran == ["k", "q"]
    with pytest.raises(CoverageError, match="Asked for FP8 and never ran: k; q"):
        c.assert_at_least(0.85)


def test_flops_are_those_of_hand_counts_and_of_torch() -> None:
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 16))
    x = torch.randn(4, 8, requires_grad=True)
    with coverage(model) as c:
        model(x).sum().backward()
    first, second = 2 * 4 * 8 * 24, 2 * 4 * 24 * 16
    assert products(c) == {
        ("0", False, "linear"): first, ("0", True, "linear"): 2 * first,
        ("2", False, "linear"): second, ("2", True, "linear"): 2 * second,
    }  # fmt: skip
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert c.flops() == counter.get_total_flops()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_and_the_output_layer_are_apart(implementation: str, device: str) -> None:
    """Two queries' heads share one of keys; 2 layers, 32 tokens in rows of 16, width 64."""
    with torch.device(device):
        model = models.of_transformers("Llama", attn_implementation=implementation)
    with coverage(model) as c:
        models.loss_of(model, device).backward()
    scores = 2 * (2 * 2 * 16 * 16 * 32)  # the FLOPs of one product of two rows, two heads
    backward = 5 if implementation == "sdpa" and device == "cpu" else 4
    found = products(c)
    for layer in (0, 1):
        name = f"model.layers.{layer}.self_attn"
        assert found[name, False, "attention"] == 2 * scores
        assert found[name, True, "attention"] in (backward * scores, 4 * scores, 5 * scores)
    assert c.flops(kinds=("head",)) == 3 * 2 * 32 * 64 * 96
    linear = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)  # weights of two layers
    assert c.flops(kinds=("linear",)) == 3 * 2 * 32 * linear


def test_other_products_are_counted() -> None:
    x, y, v = torch.ones(2, 8, 6), torch.ones(2, 6, 4), torch.ones(6)
    with coverage() as c:
        torch.einsum("bij,bjk->bik", x, y)
        torch.baddbmm(torch.zeros(2, 8, 4), x, y)
        x[0] @ v
        F.conv1d(torch.ones(1, 4, 10), torch.ones(8, 4, 3))
        F.grouped_mm(torch.ones(2, 16, 32).bfloat16(), torch.ones(2, 32, 16).bfloat16())
        fp8, one = torch.ones(16, 32).to(torch.float8_e4m3fn), torch.tensor(1.0)
        torch._scaled_mm(fp8, fp8.t(), one, one, out_dtype=torch.bfloat16)
    found = {p.op: (flops, p.state) for p, (_, flops) in c.products.items()}
    batched, never = 2 * 2 * 8 * 6 * 4, "never asked for"
    assert found == {
        "bmm": (batched, never), "baddbmm": (batched, never), "mv": (2 * 8 * 6, never),
        "convolution": (2 * 8 * 8 * 4 * 3, never), "_grouped_mm": (2 * 2 * 16 * 32 * 16, never),
        "_scaled_mm": (2 * 16 * 32 * 16, "in FP8"),
    }  # fmt: skip


def test_each_size_of_a_product_counts_once() -> None:
    """Sizes of attention, of groups of rows, columns and sums, and of packed FP4 all differ."""
    aten = torch.ops.aten
    q, k, v = (torch.empty(2, 3, *sizes, device="meta") for sizes in ((5, 7), (11, 7), (11, 13)))
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert FLOPS[getattr(aten, name)](q, k, v) == 2 * 2 * 3 * 5 * 11 * (7 + 13)
    backward = FLOPS[getattr(aten, f"{name}_backward")](q, q, k, v, q, q, 0.0, False)
    assert backward == 2 * 2 * 3 * 5 * 11 * (3 * 7 + 2 * 13)
    groups = ((16, 32), (2, 32, 48)), ((2, 16, 32), (32, 48)), ((16, 32), (32, 48))
    for a, b in groups:
        count = FLOPS[aten._grouped_mm]
        assert (
            count(torch.empty(a, device="meta"), torch.empty(b, device="meta")) == 2 * 16 * 32 * 48
        )
    packed = torch.empty(4, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert FLOPS[aten._scaled_mm](packed, packed.t()) == 2 * 4 * 16 * 4


def of_states(**flops: int) -> Coverage:
    """Return products of a module "in FP8", one "left" out of it, and one of the "head"."""
    c = Coverage()
    for name, count in flops.items():
        state, kind = ("in FP8" if name == "fp8" else "never asked for"), "linear"
        if name in ("head", "attention"):
            kind = name
        c.add(Product(name, False, "mm", (), (), state, kind), count)  # type: ignore[arg-type]
    return c


def test_the_share_that_is_asked_for_is_enough() -> None:
    c = of_states(fp8=85, left=15, head=1000, attention=1000)
    assert c.share == 0.85
    c.assert_at_least(0.85)
    of_states(fp8=3).assert_at_least(1.0)
    with pytest.raises(CoverageError, match="left .never asked for, 15"):
        c.assert_at_least(0.8501)
    c.add(Product("kept", False, "lstm", (), (), "not known", why="it is opaque"), 0)
    with pytest.raises(CoverageError, match="kept: lstm .it is opaque"):
        c.assert_at_least(0.1)
    with pytest.raises(CoverageError, match="kept was to stay out of FP8: kept .lstm, not known"):
        c.assert_kept("kept")
    c.assert_kept("left", "head")


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_belongs_to_its_module(reentrant: bool) -> None:
    model = models.mlp()
    x = torch.randn(4, models.WIDTH, requires_grad=True)
    with coverage(model) as c:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    one = 2 * 4 * 64 * 128
    again = 1 if reentrant else 0  # a saved tensor of the last product is found before it runs
    assert products(c) == {
        ("0", False, "linear"): 2 * one, ("0", True, "linear"): 2 * one,
        ("2", False, "linear"): (1 + again) * one, ("2", True, "linear"): 2 * one,
    }  # fmt: skip


class Late(torch.autograd.Function):
    """Multiply in the backward pass alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ ctx.saved_tensors[0], None


class Around(nn.Module):
    """A module with an FP8 parameter, which goes on after the module in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.kept = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Late.apply(self.inner(x), torch.ones(8, 8))
        return out


def test_a_backward_product_belongs_to_the_module_that_went_on() -> None:
    """And what runs inside of a module that was asked for FP8 was asked for, too."""
    with coverage(model := nn.Sequential(Around())) as c:
        model(torch.ones(4, 8, requires_grad=True)).sum().backward()
    one = 2 * 4 * 8 * 8
    assert products(c) == {
        ("0.inner", False, "linear"): one, ("0.inner", True, "linear"): 2 * one,
        ("0", True, "linear"): one,
    }  # fmt: skip
    assert {p.state for p in c.products} == {"asked for and not in FP8"}


class Stored(torch.Tensor):
    """A weight that is kept in FP8 and multiplied in FP32."""

    payload: torch.Tensor

    @staticmethod
    def __new__(cls, payload: torch.Tensor) -> Stored:
        made: Stored = torch.Tensor._make_wrapper_subclass(cls, payload.shape, dtype=torch.float32)
        made.payload = payload
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["payload"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [x.payload.float() if isinstance(x, Stored) else x for x in args]
        return func(*plain, **(kwargs or {}))


def test_one_operand_in_fp8_is_no_product_in_fp8() -> None:
    with coverage() as c:
        torch.ones(4, 8) @ Stored(torch.ones(8, 4).to(torch.float8_e4m3fn))
    (product,) = c.products
    assert product.state == "never asked for" and product.dtypes == ("float32", "float8_e4m3fn")


def test_compiled_and_inferring_programs_are_seen() -> None:
    model = models.mlp()
    x = torch.randn(4, models.WIDTH)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    with coverage(model) as c, torch.inference_mode():
        compiled(x)
        model(x)
    assert products(c) == {(name, False, "linear"): 2 * 2 * 4 * 64 * 128 for name in ("0", "2")}


def test_what_cannot_be_classified_is_said() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8))
    with coverage(model) as c:
        model(torch.randn(2, 3, 8))
    assert any("1: " in line and "not counted" in line for line in c.not_known)
    with pytest.raises(CoverageError, match="is not known"):
        c.assert_at_least(0.1)

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(
                torch.ones(8, 8).to(torch.float8_e4m3fn), requires_grad=False
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(x.numpy() @ x.numpy().T)

    with coverage(nn.Sequential(hidden := Hidden())) as c:
        hidden(torch.ones(4, 8))
    assert c.not_known == ["0: forward (it ran, and no product of it was seen)"]


def test_an_operation_of_another_library_on_fp8_is_not_known() -> None:
    @torch.library.custom_op("coverage_tests::multiply", mutates_args=())
    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.float() @ b.float()

    with coverage() as c:
        multiply(torch.ones(4, 4).to(torch.float8_e5m2), torch.ones(4, 4))
    assert len(c.not_known) == 1 and "coverage_tests" in c.not_known[0]
    assert c.flops() == 0


def test_transformer_engine_on_a_cpu_announces_its_products(driver: Driver, tmp_path: Path) -> None:
    need_sources(DEFAULT_VERSION)
    program = """
import torch, te_cpu
from fp8_coverage import coverage
te = te_cpu.load()
from transformer_engine.common.recipe import Float8CurrentScaling
model = torch.nn.Sequential(te.Linear(64, 64), te.LayerNormMLP(64, 128))
x = torch.randn(16, 64, device="cuda", requires_grad=True)
for enabled, share in ((True, 1.0), (False, 0.0)):
    with coverage(model) as c, te.fp8_autocast(enabled=enabled, fp8_recipe=Float8CurrentScaling()):
        y = model(x)
        y.sum().backward()
    flops = 3 * 2 * 16 * (64 * 64 + 2 * 64 * 128)
    assert (c.share, c.flops(), c.not_known) == (share, flops, []), str(c)
    assert {p.module for p in c.products} == {"0", "1"} and c.asked <= {"0", "1"}
"""
    done = driver.run_python("-c", program, cwd=ROOT, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_compiled_products_of_transformer_engine_are_observed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for its compiled module: on a CPU te-on-cpu announces the products instead."""
    te = ModuleType("transformer_engine_torch")
    te.generic_gemm = lambda a, trans_a, b, trans_b, *rest: "result"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, te.__name__, te)
    plain = te.generic_gemm

    def operand(*shape: int, fp8: bool) -> Any:
        kept = {"_fp8_dtype": "E4M3"} if fp8 else {"dtype": torch.bfloat16}
        return SimpleNamespace(size=lambda: torch.Size(shape), **kept)

    with coverage() as c:
        for fp8 in (True, False):
            weight, x = operand(64, 32, fp8=fp8), operand(2, 8, 32, fp8=fp8)
            grad = operand(2, 8, 64, fp8=fp8)
            assert te.generic_gemm(weight, True, x, False, None) == "result"
            te.generic_gemm(weight, False, grad, False, None)
            te.generic_gemm(x, False, grad, True, None)
    assert te.generic_gemm is plain
    assert c.flops("in FP8") == c.flops("never asked for") == 3 * 2 * 16 * 32 * 64


def test_a_recording_inside_of_another_leaves_it_whole() -> None:
    from megafp8 import fp8

    model = models.mlp()
    state = fp8.convert(model, "tensorwise", skip="0")
    with coverage(model) as outer:
        with coverage(model) as inner, state.microbatch():
            model(torch.randn(16, models.WIDTH)).sum().backward()
        assert outer.products == inner.products and 0 < inner.share < 1
        with state.microbatch():
            model(torch.randn(16, models.WIDTH)).sum().backward()
    assert outer.flops("in FP8") == 2 * inner.flops("in FP8")
    recording = coverage()
    with recording, pytest.raises(RuntimeError, match="runs already"), recording:
        pass
    with recording as again:
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert again.flops() == 48
    with pytest.raises(TypeError, match="model='gpt2': give a torch.nn.Module"):
        coverage("gpt2")  # type: ignore[arg-type]


def test_what_runs_in_another_thread_is_not_known() -> None:
    from megafp8 import fp8

    model, other = models.mlp(), models.mlp()
    for each in (model, other):
        fp8.convert(each, "tensorwise", skip="0")

    def seen(runs: nn.Module, *recorded: nn.Module) -> Coverage:
        with coverage(*recorded) as c:
            thread = threading.Thread(target=runs, args=(torch.randn(16, models.WIDTH),))
            thread.start()
            thread.join()
            model(torch.randn(16, models.WIDTH))
        return c

    assert seen(other, model).not_known == [] and seen(other, model).share == 0.5
    for c in (seen(model, model), seen(other)):
        assert c.share == 0.5 and len(c.not_known) == 2 and "another thread" in c.not_known[0]
        with pytest.raises(CoverageError, match="is not known"):
            c.assert_at_least(0.4)


def test_the_announcement_is_off_where_nothing_records() -> None:
    from fp8_numerics import gemm as products_of_ours

    assert products_of_ours.LISTENER is None
    with pytest.raises(RuntimeError), coverage():
        assert products_of_ours.LISTENER is not None
        raise RuntimeError
    assert products_of_ours.LISTENER is None and GemmCounter().flops == {}


def test_the_command_says_what_a_script_ran(driver: Driver, tmp_path: Path) -> None:
    script, found = tmp_path / "train.py", tmp_path / "found.json"
    script.write_text(
        "import sys, torch\n"
        "class Net(torch.nn.Linear): pass\n"
        "Net(8, 8)(torch.ones(4, 8)).sum().backward()\n"
        "print(sys.argv[1:])\n"
    )

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return driver.run_python("-m", "fp8_coverage", *words, cwd=ROOT, folder=tmp_path)

    done = command("--at-least", "85%", "--json", str(found), str(script), "--at-least", "x")
    assert done.returncode == 3 and done.stdout == "['--at-least', 'x']\n"
    assert "0.0% of the FLOPs ran in FP8" in done.stderr and "Net" in done.stderr
    written = json.loads(found.read_text())
    assert written["share"] == 0 and len(written["products"]) == 2
    refused = command("--json", str(found), str(script))
    assert refused.returncode == 2 and "name a new file" in refused.stderr
    assert "give a share such as 85%" in command("--at-least", "85", str(script)).stderr


@pytest.mark.parametrize(("end", "code"), [("7", 7), ("'no data'", 1), ("", 0), ("0", 3)])
def test_the_command_ends_with_the_code_of_the_script(
    end: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """3 stands for too little FP8, of which a script that failed says nothing."""
    script = tmp_path / "train.py"
    script.write_text(f"import sys, torch\ntorch.ones(2, 3) @ torch.ones(3, 4)\nsys.exit({end})\n")
    least = [] if not end else ["--at-least", "85%"]
    assert main([*least, str(script)]) == code
    said = capsys.readouterr().err
    assert "share of FP8: 0.0%" in said and ("no data" in said) == (code == 1)
    assert ("of the FLOPs ran in FP8" in said) == (code == 3)


def test_the_fixture(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import torch\n"
        "def test_it(fp8_coverage):\n"
        "    with fp8_coverage() as c:\n"
        "        torch.ones(2, 3) @ torch.ones(3, 4)\n"
        "    assert c.flops() == 48\n"
        "    c.assert_at_least(0.85)\n"
    )
    plugin = ["-p", "no:fp8_coverage", "-p", "fp8_coverage.fixture", "-p", "no:cacheprovider"]
    line = [sys.executable, "-m", "pytest", "-q", *plugin, str(tmp_path)]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the installed one
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, env=alone)
    assert done.returncode == 1 and "CoverageError: 0.0% of the FLOPs" in done.stdout


@pytest.mark.parametrize("at_least", [None, 0.85])
def test_the_callback_records_a_step_of_the_trainer(at_least: float | None, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = models.of_transformers("Llama")
    callback = trainer_callback(at_least=at_least, step=1)
    rows = [{"input_ids": [1] * 8, "labels": [1] * 8}] * 8
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=1, use_cpu=True, report_to=[],
            gradient_accumulation_steps=2, save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=rows, callbacks=[callback],
    )  # fmt: skip
    if at_least is None:
        trainer.train()
    else:
        with pytest.raises(CoverageError):
            trainer.train()
    linear = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    assert callback.coverage.flops(kinds=("linear",)) == 2 * 3 * 2 * 8 * linear


def test_the_callback_waits_for_its_step() -> None:
    pytest.importorskip("transformers")
    callback = trainer_callback(step=1)
    for number in range(3):
        callback.on_step_begin(None, SimpleNamespace(global_step=number), None)
        torch.ones(number + 2, 3) @ torch.ones(3, 4)
        callback.on_step_end(None, SimpleNamespace(global_step=number + 1), None)
        assert (callback.coverage is None) == (number == 0)
    assert callback.coverage.flops() == 2 * 3 * 3 * 4


@pytest.mark.parametrize("share", [0, 1.5, 85])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with coverage() as c:
        pass
    with pytest.raises(ValueError, match="such as 0.85"):
        c.assert_at_least(share)
    with pytest.raises(CoverageError, match="No product was recorded"):
        c.assert_at_least(0.85)
