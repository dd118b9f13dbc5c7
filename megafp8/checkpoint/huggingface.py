"""Convert GPTs to and from the form of the library transformers, as a model of a known family.

Numbers stay the same bit for bit, unless an export asks for a narrower dtype than FP32.

A logical tensor of ours becomes a tensor of transformers by renaming. GPT-2 also keeps the weights
of linears transposed, as [in, out], and joins queries, keys and values in one tensor. In this file
`theirs` marks names of transformers, and `ours` logical names. `families` has the keys of
configurations, and `huggingface_files` reads and writes the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megafp8.checkpoint.families import FAMILIES, Family, WithExperts, read_family
from megafp8.config.architecture import function_differences
from megafp8.config.keys import MAX_VOCABULARY
from megafp8.errors import CheckpointError, UserError
from megafp8.foreign import Fields, ForeignFileError, shown_value
from megafp8.specs import GPTSpec
from megafp8.specs.parameters import HEAD, POSITION, WORD, logical_shapes


class ConversionError(UserError):
    """Report a model that no family of transformers can express."""


@dataclass(frozen=True)
class Mapped:
    """Say which logical tensors make up one tensor of transformers.

    The logical tensors are joined along their first dimension. The result is then transposed if
    `transposed` is set, or divided along a new first dimension into those of `stacked` experts.
    Files may have the tensor by one of the names `also` instead.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    stacked: int = 0
    also: tuple[str, ...] = ()

    def shape(self, first: Sequence[int]) -> tuple[int, ...]:
        """Return the tensor's shape, of that of each logical tensor."""
        rows = len(self.ours) * first[0]
        if self.stacked:
            return (self.stacked, rows // self.stacked, *first[1:])
        return (rows, *first[1:])[:: -1 if self.transposed else 1]


def architecture(spec: GPTSpec, family: str | None = None) -> str:
    """Return the first family that can express a model, or `family` if it can.

    Raises:
        ConversionError: None can; the message names the settings that do not fit.
    """
    named = [family] if family else [name for name in FAMILIES if _has(name) == bool(spec.moe)]
    families = {name: FAMILIES[name] for name in named}
    misfits = {name: _misfits(spec, members) for name, members in families.items()}
    for name, wrong in misfits.items():
        if not wrong:
            return name
    raise ConversionError(
        "no family of transformers that megafp8 knows can express this model. "
        + "; ".join(f"{name} has no {', '.join(wrong)}" for name, wrong in misfits.items())
        + ". Export a model without these settings"
    )


def _has(family: str) -> bool:
    """Whether models of a family have experts."""
    return isinstance(FAMILIES[family], WithExperts)


def _misfits(spec: GPTSpec, family: Family) -> list[str]:
    """Return the settings of a model that are others once its `config.json` is read back."""
    if isinstance(family, WithExperts) and spec.moe is None:
        return ["num_moe_experts=None"]
    try:
        again = from_config(family.to_keys(spec) | _common(spec), Path("config.json"))
    except CheckpointError as error:  # such as a width that its heads do not divide
        return [f"such model ({error.reason})"]
    if spec.moe is not None and all(spec.moe.layers):  # a width that no layer has
        again = replace(again, ffn_hidden_size=spec.ffn_hidden_size)
    return [f"{name}={value}" for name, (value, _) in function_differences(spec, again).items()]


def to_config(
    spec: GPTSpec, dtype: torch.dtype, eod_id: int | None, family: str | None = None
) -> dict[str, Any]:
    """Return the content of a model's `config.json`.

    Args:
        spec: The model.
        dtype: The dtype in which the weights are written.
        eod_id: The token that ends a document, which becomes the token of begin and end.
        family: The family to write, by default the first one that can express the model.
    """
    return {
        **FAMILIES[architecture(spec, family)].to_keys(spec),
        **_common(spec),
        "bos_token_id": eod_id,
        "eos_token_id": eod_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
    }


def _common(spec: GPTSpec) -> dict[str, Any]:
    return {
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.share_embeddings_and_output_weights,
        "initializer_range": spec.init_method_std,
    }


def from_config(config: dict[str, Any], file: Path) -> GPTSpec:
    """Return the model that a `config.json` describes; `file` is its path, for errors.

    Raises:
        CheckpointError: A key is missing or has a value that no model has, or no model of ours is
            the same.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        hint = f"Models of type {', '.join(FAMILIES)} can be imported"
        raise CheckpointError(file, f"model_type is {shown_value(kind)}", hint)
    try:
        return read_family(family, Fields(config), file)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(file, str(error), "Give the config.json of a model") from error


def notes_on(config: dict[str, Any]) -> list[str]:
    """Return what the user should know of how a `config.json` that is accepted was read."""
    return FAMILIES[config["model_type"]].notes(Fields(config))


def end_of_text(config: dict[str, Any], file: Path) -> int | None:
    """Return the token that ends a text, of a `config.json`; of several tokens, the first one.

    Raises:
        CheckpointError: The value is neither a token's number, nor a list of such, nor null.
    """
    ends = config.get("eos_token_id")
    first = ends[0] if isinstance(ends, list) and ends else ends
    if first is None:
        return None
    try:
        number: int = Fields({"eos_token_id": first}).whole("eos_token_id", 0, MAX_VOCABULARY)
    except ForeignFileError as error:
        raise CheckpointError(file, str(error), "Give the config.json of a model") from error
    return number


def mapping(spec: GPTSpec, *, fused: bool = False) -> Iterator[Mapped]:
    """Yield every tensor that transformers has of a model, in the model's order.

    With `fused` they are those of its modules in memory, where transformers 5 joins the experts of
    a layer, and else those of its files.
    """
    family = architecture(spec)
    yield from _gpt2_tensors(spec) if family == "gpt2" else _decoder_tensors(spec, family, fused)
    if not spec.share_embeddings_and_output_weights:
        yield Mapped("lm_head.weight", (HEAD,))


_GPT2 = {
    "ln_1": ("attention_norm",),
    "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
    "attn.c_proj": ("attention.projection",),
    "ln_2": ("mlp_norm",),
    "mlp.c_fc": ("mlp.fc1",),
    "mlp.c_proj": ("mlp.fc2",),
}
_DECODER = {
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.projection",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.fc2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_norm": "attention.query_norm",
    "self_attn.k_norm": "attention.key_norm",
}
"""Our tensors of a layer, by their names in the library's modules."""
_EXPERTS = {
    "mixtral": ("block_sparse_moe", {"gate": "w1", "up": "w3", "fc2": "w2"}),
    "qwen3_moe": ("mlp", {"gate": "gate_proj", "up": "up_proj", "fc2": "down_proj"}),
}
"""By family, the module of a layer's experts in files, and the names of an expert's linears."""
_FUSED = {"gate_up_proj": ("gate", "up"), "down_proj": ("fc2",)}
"""The tensors that join all experts of a layer in memory, and what each has of an expert."""


def _gpt2_tensors(spec: GPTSpec) -> Iterator[Mapped]:
    yield Mapped("transformer.wte.weight", (WORD,))
    yield Mapped("transformer.wpe.weight", (POSITION,))
    for index in range(spec.num_layers):
        for theirs, ours in _GPT2.items():
            for kind in ("weight", "bias"):
                names = tuple(f"layers.{index}.{name}.{kind}" for name in ours)
                is_linear = not theirs.startswith("ln_") and kind == "weight"
                yield Mapped(f"transformer.h.{index}.{theirs}.{kind}", names, is_linear)
    yield Mapped("transformer.ln_f.weight", ("final_norm.weight",))
    yield Mapped("transformer.ln_f.bias", ("final_norm.bias",))


def _decoder_tensors(spec: GPTSpec, family: str, fused: bool) -> Iterator[Mapped]:
    listed = logical_shapes(spec)
    yield Mapped("model.embed_tokens.weight", (WORD,))
    for index in range(spec.num_layers):
        for kind in ("weight", "bias"):
            for theirs, name in _DECODER.items():
                if (ours := f"layers.{index}.{name}.{kind}") in listed:
                    yield Mapped(f"model.layers.{index}.{theirs}.{kind}", (ours,))
        if spec.moe is not None and spec.moe.layers[index]:
            yield from _expert_tensors(index, spec.moe.num_experts, family, fused)
    yield Mapped("model.norm.weight", ("final_norm.weight",))


def _expert_tensors(layer: int, count: int, family: str, fused: bool) -> Iterator[Mapped]:
    """Yield the router and the experts of a layer, as files have them or, if `fused`, modules.

    A file may name them by their module in memory instead, whose name is then in `also`.
    """
    (in_files, linears), in_memory = _EXPERTS[family], "mlp"
    modules = (in_memory, in_files) if fused else (in_files, in_memory)
    theirs, *others = (f"model.layers.{layer}.{module}" for module in dict.fromkeys(modules))
    ours = f"layers.{layer}.mlp"

    def one(name: str, *parts: str, also: tuple[str, ...] = (), stacked: int = 0) -> Mapped:
        """Return the tensor `name` of the module, made up of `parts` of our module."""
        names = [f"{module}.{end}" for module in (theirs, *others) for end in (name, *also)]
        tensors = tuple(f"{ours}.{part}.weight" for part in parts)
        return Mapped(names[0], tensors, stacked=stacked, also=tuple(names[1:]))

    yield one("gate.weight", "router")
    if fused:
        for name, parts in _FUSED.items():
            joined = [f"experts.{expert}.{part}" for expert in range(count) for part in parts]
            yield one(f"experts.{name}", *joined, also=(f"experts.{name}.weight",), stacked=count)
        return
    for expert in range(count):
        for part, name in linears.items():
            yield one(f"experts.{expert}.{name}.weight", f"experts.{expert}.{part}")


def is_fused(name: str) -> bool:
    """Whether a tensor of a file joins all experts of a layer, as they are in memory."""
    return any(f".experts.{fused}" in name for fused in _FUSED)


def to_theirs(entry: Mapped, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Return one tensor of transformers; `read` returns one of ours by its logical name."""
    whole = torch.cat([read(name) for name in entry.ours])
    if entry.stacked:
        return whole.view(entry.stacked, -1, *whole.shape[1:])
    return whole.t().contiguous() if entry.transposed else whole
