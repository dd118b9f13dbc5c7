"""Convert GPTs to and from the form of the library transformers, as GPT-2 or Llama.

Numbers stay the same bit for bit, unless an export asks for a narrower dtype than FP32.

A logical tensor of ours becomes a tensor of transformers by renaming. GPT-2 also keeps the weights
of linears transposed, as [in, out], and joins queries, keys and values in one tensor. In this file
`theirs` marks names of transformers, and `ours` logical names. `huggingface_files` reads and writes
the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megafp8.errors import CheckpointError, UserError
from megafp8.specs import GPTSpec

_GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu-tanh": "gelu_new", "squared-relu": "relu2"}
_LLAMA_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
_GPT2_ALIASES = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}


class ConversionError(UserError):
    """Report a model that neither of the two architectures can express."""


@dataclass(frozen=True)
class Mapped:
    """Say which logical tensors make up one tensor of transformers.

    The logical tensors are joined along their first dimension, and the result is then transposed
    if `transposed` is set.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


def architecture(spec: GPTSpec) -> str:
    """Return which architecture can express a model: `gpt2` or `llama`.

    Raises:
        ConversionError: Neither can; the message names the settings that do not fit.
    """
    misfits = {"gpt2": _misfits(spec, _GPT2), "llama": _misfits(spec, _LLAMA)}
    for name, wrong in misfits.items():
        if not wrong:
            return name
    raise ConversionError(
        "neither GPT-2 nor Llama of transformers can express this model. "
        + "; ".join(f"{name} has no {', '.join(wrong)}" for name, wrong in misfits.items())
        + ". Export a model without these settings"
    )


_GPT2: dict[str, Callable[[GPTSpec], bool]] = {
    "normalization": lambda s: s.normalization == "layernorm",
    "zero_centered_gamma": lambda s: not s.zero_centered_gamma,
    "activation": lambda s: s.activation in _GPT2_ACTIVATIONS,
    "position_embedding_type": lambda s: s.position_embedding_type == "learned_absolute",
    "bias": lambda s: s.bias,
    "num_query_groups": lambda s: s.num_kv_heads == s.num_attention_heads,
    "kv_channels": lambda s: s.query_size == s.hidden_size,
    "transformer_block_type": lambda s: s.transformer_block_type == "pre_ln",
}
_LLAMA: dict[str, Callable[[GPTSpec], bool]] = {
    "normalization": lambda s: s.normalization == "rmsnorm",
    "zero_centered_gamma": lambda s: not s.zero_centered_gamma,
    "activation": lambda s: s.activation in _LLAMA_ACTIVATIONS,
    "position_embedding_type": lambda s: s.position_embedding_type == "rope",
    "rotary_percentage": lambda s: s.rotary_percentage == 1.0,
    "transformer_block_type": lambda s: s.transformer_block_type == "pre_ln",
}


def _misfits(spec: GPTSpec, needs: dict[str, Callable[[GPTSpec], bool]]) -> list[str]:
    return [f"{name}={getattr(spec, name)}" for name, fits in needs.items() if not fits(spec)]


def to_config(spec: GPTSpec, dtype: torch.dtype, eod_id: int | None) -> dict[str, Any]:
    """Return the content of a model's `config.json`.

    Args:
        spec: The model.
        dtype: The dtype in which the weights are written.
        eod_id: The token that ends a document, which becomes the token of begin and end.
    """
    common = {
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.share_embeddings_and_output_weights,
        "initializer_range": spec.init_method_std,
        "bos_token_id": eod_id,
        "eos_token_id": eod_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
    }
    if architecture(spec) == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_positions": spec.max_position_embeddings,
            "n_embd": spec.hidden_size,
            "n_layer": spec.num_layers,
            "n_head": spec.num_attention_heads,
            "n_inner": spec.ffn_hidden_size,
            "activation_function": _GPT2_ACTIVATIONS[spec.activation],
            "layer_norm_epsilon": spec.layernorm_epsilon,
            "resid_pdrop": spec.hidden_dropout,
            "embd_pdrop": spec.hidden_dropout,
            "attn_pdrop": spec.attention_dropout,
            **common,
        }
    factor = spec.seq_len_interpolation_factor
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rotary_base}
    if factor is not None:
        rope |= {"rope_type": "linear", "factor": float(factor)}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": spec.max_position_embeddings,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_size,
        "hidden_act": _LLAMA_ACTIVATIONS[spec.activation],
        "rms_norm_eps": spec.layernorm_epsilon,
        "attention_bias": spec.bias,
        "mlp_bias": spec.bias,
        "attention_dropout": spec.attention_dropout,
        "rope_parameters": rope,
        # transformers 4 reads these two, and transformers 5 `rope_parameters`
        "rope_theta": spec.rotary_base,
        "rope_scaling": None if factor is None else {"type": "linear", "factor": float(factor)},
        **common,
    }


def from_config(config: dict[str, Any], file: Path) -> GPTSpec:
    """Return the model that a `config.json` describes; `file` is its path, for errors.

    Raises:
        CheckpointError: A key is missing, or no model of ours is the same.
    """
    kind = config.get("model_type")
    try:
        if kind == "gpt2":
            return _from_gpt2(config, file)
        if kind == "llama":
            return _from_llama(config, file)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"a key is missing or has a wrong type ({error!r})"
        raise CheckpointError(file, reason, "Give a complete model folder") from error
    hint = "Models of type gpt2 and llama can be imported"
    raise CheckpointError(file, f"model_type is {kind!r}", hint)


def _from_gpt2(c: dict[str, Any], file: Path) -> GPTSpec:
    function = c.get("activation_function", "gelu_new")
    activations = {theirs: ours for ours, theirs in _GPT2_ACTIVATIONS.items()}
    activation = activations.get(_GPT2_ALIASES.get(function, function))
    _only(file, c, "activation_function", activation is not None)
    _only(file, c, "scale_attn_weights", c.get("scale_attn_weights", True) is True)
    _only(file, c, "scale_attn_by_inverse_layer_idx", not c.get("scale_attn_by_inverse_layer_idx"))
    return GPTSpec(
        num_layers=int(c["n_layer"]),
        hidden_size=int(c["n_embd"]),
        ffn_hidden_size=int(c.get("n_inner") or 4 * int(c["n_embd"])),
        num_attention_heads=int(c["n_head"]),
        max_position_embeddings=int(c["n_positions"]),
        vocab_size=int(c["vocab_size"]),
        init_method_std=float(c.get("initializer_range", 0.02)),
        use_scaled_init_method=True,
        hidden_dropout=float(c.get("resid_pdrop", 0.1)),
        attention_dropout=float(c.get("attn_pdrop", 0.1)),
        ffn_dropout=0.0,
        layernorm_epsilon=float(c.get("layer_norm_epsilon", 1e-5)),
        activation=activation,  # type: ignore[arg-type]  # checked above
        share_embeddings_and_output_weights=bool(c.get("tie_word_embeddings", True)),
    )


def _from_llama(c: dict[str, Any], file: Path) -> GPTSpec:
    activations = {theirs: ours for ours, theirs in _LLAMA_ACTIVATIONS.items()}
    activation = activations.get(c.get("hidden_act", "silu"))
    _only(file, c, "hidden_act", activation is not None)
    bias = bool(c.get("attention_bias", False))
    _only(file, c, "mlp_bias", bool(c.get("mlp_bias", False)) == bias)
    rope = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "linear"):
        hint = "Models with rope_type default or linear can be imported"
        raise CheckpointError(file, f"rope_type is {rope_type!r}", hint)
    heads, hidden = int(c["num_attention_heads"]), int(c["hidden_size"])
    return GPTSpec(
        num_layers=int(c["num_hidden_layers"]),
        hidden_size=hidden,
        ffn_hidden_size=int(c["intermediate_size"]),
        num_attention_heads=heads,
        max_position_embeddings=int(c["max_position_embeddings"]),
        vocab_size=int(c["vocab_size"]),
        init_method_std=float(c.get("initializer_range", 0.02)),
        use_scaled_init_method=True,
        hidden_dropout=0.0,
        attention_dropout=float(c.get("attention_dropout") or 0.0),
        ffn_dropout=0.0,
        layernorm_epsilon=float(c.get("rms_norm_eps", 1e-6)),
        kv_channels=int(c.get("head_dim") or hidden // heads),
        num_query_groups=int(c.get("num_key_value_heads") or heads),
        normalization="rmsnorm",
        activation=activation,  # type: ignore[arg-type]  # checked above
        position_embedding_type="rope",
        rotary_base=float(rope.get("rope_theta", c.get("rope_theta", 10000.0))),
        seq_len_interpolation_factor=float(rope["factor"]) if rope_type == "linear" else None,
        bias=bias,
        share_embeddings_and_output_weights=bool(c.get("tie_word_embeddings", False)),
    )


def _only(file: Path, config: dict[str, Any], key: str, fits: bool) -> None:
    if not fits:
        hint = "megafp8 has no such model; import one without this setting"
        raise CheckpointError(file, f"{key} is {config.get(key)!r}", hint)


def mapping(spec: GPTSpec) -> Iterator[Mapped]:
    """Yield every tensor that transformers has of a model, in the model's order."""
    yield from _gpt2_tensors(spec) if architecture(spec) == "gpt2" else _llama_tensors(spec)
    if not spec.share_embeddings_and_output_weights:
        yield Mapped("lm_head.weight", ("head.weight",))


def _gpt2_tensors(spec: GPTSpec) -> Iterator[Mapped]:
    def both(theirs: str, *ours: str, linear: bool = False) -> Iterator[Mapped]:
        weights, biases = (tuple(f"{n}.{kind}" for n in ours) for kind in ("weight", "bias"))
        yield Mapped(f"{theirs}.weight", weights, transposed=linear)
        yield Mapped(f"{theirs}.bias", biases)

    yield Mapped("transformer.wte.weight", ("embedding.word.weight",))
    yield Mapped("transformer.wpe.weight", ("embedding.position.weight",))
    for index in range(spec.num_layers):
        theirs, ours = f"transformer.h.{index}", f"layers.{index}"
        qkv = [f"{ours}.attention.{part}" for part in ("query", "key", "value")]
        yield from both(f"{theirs}.ln_1", f"{ours}.attention_norm")
        yield from both(f"{theirs}.attn.c_attn", *qkv, linear=True)
        yield from both(f"{theirs}.attn.c_proj", f"{ours}.attention.projection", linear=True)
        yield from both(f"{theirs}.ln_2", f"{ours}.mlp_norm")
        yield from both(f"{theirs}.mlp.c_fc", f"{ours}.mlp.fc1", linear=True)
        yield from both(f"{theirs}.mlp.c_proj", f"{ours}.mlp.fc2", linear=True)
    yield from both("transformer.ln_f", "final_norm")


def _llama_tensors(spec: GPTSpec) -> Iterator[Mapped]:
    linears = {
        "self_attn.q_proj": "attention.query",
        "self_attn.k_proj": "attention.key",
        "self_attn.v_proj": "attention.value",
        "self_attn.o_proj": "attention.projection",
        "mlp.gate_proj": "mlp.gate",
        "mlp.up_proj": "mlp.up",
        "mlp.down_proj": "mlp.fc2",
    }
    norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    yield Mapped("model.embed_tokens.weight", ("embedding.word.weight",))
    for index in range(spec.num_layers):
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        for name, own in (linears | norms).items():
            yield Mapped(f"{theirs}.{name}.weight", (f"{ours}.{own}.weight",))
        if spec.bias:
            for name, own in linears.items():
                yield Mapped(f"{theirs}.{name}.bias", (f"{ours}.{own}.bias",))
    yield Mapped("model.norm.weight", ("final_norm.weight",))


def logical_shape(spec: GPTSpec, name: str) -> tuple[int, ...]:
    """Return the shape of one of our tensors, given its logical name."""
    hidden, ffn, *_, part, kind = (spec.hidden_size, spec.ffn_hidden_size, *name.split("."))
    linears = {
        "query": (spec.query_size, hidden),
        "key": (spec.kv_size, hidden),
        "value": (spec.kv_size, hidden),
        "projection": (hidden, spec.query_size),
        "fc1": (ffn, hidden),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "fc2": (hidden, ffn),
        "word": (spec.vocab_size, hidden),
        "head": (spec.vocab_size, hidden),
        "position": (spec.max_position_embeddings, hidden),
    }
    shape = linears.get(part, (hidden,))  # what is not in the table belongs to a norm
    return shape if kind == "weight" else shape[:1]


def to_theirs(entry: Mapped, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Return one tensor of transformers; `read` returns one of ours by its logical name."""
    whole = torch.cat([read(name) for name in entry.ours])
    return whole.t().contiguous() if entry.transposed else whole


def to_ours(entry: Mapped, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return our tensors, by logical name, that one tensor of transformers holds."""
    rows = tensor.t() if entry.transposed else tensor
    parts = rows.chunk(len(entry.ours))  # queries, keys and values are of one size in GPT-2
    return {name: part.contiguous() for name, part in zip(entry.ours, parts, strict=True)}
