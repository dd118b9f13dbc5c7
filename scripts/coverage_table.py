"""Write a page with the coverage of ten public model families under three frameworks.

python -m scripts.coverage_table [--page FILE]

Each family of transformers is built small, with random weights. `megafp8.fp8.convert`, torchao's
`convert_to_float8_training` and Transformer Engine over te-on-cpu (its `Linear` in place of
nn.Linear) each convert all they can but the output layer, and one step is recorded.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import te_cpu
from fp8_coverage import Coverage, coverage
from fp8_coverage.table import pattern
from megafp8 import fp8
from megafp8.backends.torchao import import_torchao
from scripts.packages import ROOT

PAGE = ROOT / "docs/evidence/coverage.md"
WIDTH, TOKENS = 128, 64
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": WIDTH, "n_layer": 2, "n_head": 4},
    "Llama": {},
    "Mistral": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Gemma2": {"head_dim": 32},
    "Phi3": {"pad_token_id": 0},
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"head_dim": 32, "num_experts": 4, **EXPERTS},
    "DeepseekV3": {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
        "v_head_dim": 32, **EXPERTS,
    },
}  # fmt: skip
EXPLANATION = """\
# How much of ten model families runs in FP8

`python -m scripts.coverage_table` builds each family of transformers {version} with two layers of
width {width} and random weights, lets three frameworks convert all that they convert by default but
the output layer, and records one step forward and backward with
[fp8-coverage](../../fp8_coverage/README.md). The figure is the share of FP8 in the FLOPs of all
products but attention and the output layer; below it is what took most of the rest. All products
are emulated on a CPU. The sizes are small, so the shares of experts are not those of published
models. Transformer Engine runs over te-on-cpu by its current scaling, with its `Linear` in place of
nn.Linear.

"""
Step = AbstractContextManager[Any]
Kept = ("lm_head",)


def built(family: str) -> nn.Module:
    """Return a small causal model of a family."""
    sizes: dict[str, Any] = {} if family == "GPT2" else {
        "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4 if family == "DeepseekV3" else 2,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(vocab_size=512, **sizes | FAMILIES[family])
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model: nn.Module = getattr(transformers, kind)(config)
    return model


def by_convert(model: nn.Module) -> Step:
    """Convert by megafp8, leaving out by name what it says that it cannot convert."""
    try:
        return fp8.convert(model, recipe="rowwise", skip=Kept).microbatch()
    except fp8.Fp8Error as refused:
        skip = [*Kept, *_matrices_that_are_no_linears(model)]
        try:
            return fp8.convert(model, recipe="rowwise", skip=skip).microbatch()
        except fp8.Fp8Error:
            raise refused from None


def _matrices_that_are_no_linears(model: nn.Module) -> list[str]:
    return sorted(
        {
            pattern(name)
            for name, module in model.named_modules()
            if not isinstance(module, nn.Linear | nn.Embedding)
            and any(p.dim() > 1 for p in module.parameters(recurse=False))
        }
    )


def by_torchao(model: nn.Module) -> Step:
    """Convert by torchao, whose linears are emulated on a CPU."""
    float8 = import_torchao()
    float8.convert_to_float8_training(
        model,
        config=float8.Float8LinearConfig(emulate=True),
        module_filter_fn=lambda module, name: name not in Kept,
    )
    return nullcontext()


def by_transformer_engine(model: nn.Module) -> Step:
    """Put Transformer Engine's linears in place of nn.Linear, as Accelerate does."""
    te = te_cpu.load()
    recipe = __import__("transformer_engine.common.recipe", fromlist=["recipe"])
    for name, module in list(model.named_modules()):
        fits = isinstance(module, nn.Linear) and not {x % 16 for x in module.weight.shape} - {0}
        if isinstance(module, nn.Linear) and fits and name not in Kept:
            made = te.Linear(
                module.in_features, module.out_features, bias=module.bias is not None,
                params_dtype=module.weight.dtype,
            )  # fmt: skip
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], made)
    step: Step = te.fp8_autocast(enabled=True, fp8_recipe=recipe.Float8CurrentScaling())
    return step


FRAMEWORKS: dict[str, Callable[[nn.Module], Step]] = {
    "`fp8.convert`": by_convert,
    "torchao": by_torchao,
    "Transformer Engine": by_transformer_engine,
}


def recorded(family: str, convert: Callable[[nn.Module], Step]) -> Coverage:
    """Return what one step of a family ran after a conversion."""
    torch.manual_seed(0)
    model = built(family)
    step, ids = convert(model), torch.randint(0, 512, (1, TOKENS))
    with coverage(model) as found, step:
        model(input_ids=ids, labels=ids).loss.backward()
    return found


def cell(family: str, convert: Callable[[nn.Module], Step]) -> str:
    """Return the share and what took most of the rest, or why there is none."""
    try:
        found = recorded(family, convert)
    except fp8.Fp8Error as refused:
        return f"refused: {refused.reason}"
    finally:
        gc.collect()
    rest = found.missing()[:1] if found.share < 1 else []
    unknown = ["not all known"] if found.not_known else []
    return "<br>".join([f"{found.share:.1%}", *rest, *unknown])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, default=PAGE)
    page = parser.parse_args().page
    lines = ["| family | " + " | ".join(FRAMEWORKS) + " |", "|---" * (1 + len(FRAMEWORKS)) + "|"]
    for family in FAMILIES:
        cells = [cell(family, convert) for convert in FRAMEWORKS.values()]
        lines.append(f"| {family} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    text = EXPLANATION.format(version=transformers.__version__, width=WIDTH)
    page.write_text(text + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
