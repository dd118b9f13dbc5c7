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

from megafp8.config.architecture import function_differences
from megafp8.config.keys import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCABULARY,
    MAX_WIDTH,
)
from megafp8.errors import CheckpointError, UserError
from megafp8.foreign import Fields, ForeignFileError, shown_value
from megafp8.specs import GPTSpec

_GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu-tanh": "gelu_new", "squared-relu": "relu2"}
_LLAMA_ACTIVATIONS = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu-tanh": "gelu_pytorch_tanh",
    "reglu": "relu",
}
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
    misfits = {name: _misfits(spec, to_keys) for name, to_keys in _CONFIGS.items()}
    for name, wrong in misfits.items():
        if not wrong:
            return name
    raise ConversionError(
        "neither GPT-2 nor Llama of transformers can express this model. "
        + "; ".join(f"{name} has no {', '.join(wrong)}" for name, wrong in misfits.items())
        + ". Export a model without these settings"
    )


def _misfits(spec: GPTSpec, to_keys: Callable[[GPTSpec], dict[str, Any]]) -> list[str]:
    """Return the settings of a model that are others once its `config.json` is read back."""
    again = from_config(to_keys(spec) | _common(spec), Path("config.json"))
    return [f"{name}={value}" for name, (value, _) in function_differences(spec, again).items()]


def to_config(spec: GPTSpec, dtype: torch.dtype, eod_id: int | None) -> dict[str, Any]:
    """Return the content of a model's `config.json`.

    Args:
        spec: The model.
        dtype: The dtype in which the weights are written.
        eod_id: The token that ends a document, which becomes the token of begin and end.
    """
    return {
        **_CONFIGS[architecture(spec)](spec),
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


def _to_gpt2(spec: GPTSpec) -> dict[str, Any]:
    """Return the keys of a GPT-2. One that it cannot express has another value when read back."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_positions": spec.max_position_embeddings,
        "n_embd": spec.hidden_size,
        "n_layer": spec.num_layers,
        "n_head": spec.num_attention_heads,
        "n_inner": spec.ffn_hidden_size,
        "activation_function": _GPT2_ACTIVATIONS.get(spec.activation, "gelu_new"),
        "layer_norm_epsilon": spec.layernorm_epsilon,
        "resid_pdrop": spec.hidden_dropout,
        "embd_pdrop": spec.hidden_dropout,
        "attn_pdrop": spec.attention_dropout,
    }


def _to_llama(spec: GPTSpec) -> dict[str, Any]:
    """Return the keys of a Llama. One that it cannot express has another value when read back."""
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
        "hidden_act": _LLAMA_ACTIVATIONS.get(spec.activation, "silu"),
        "rms_norm_eps": spec.layernorm_epsilon,
        "attention_bias": spec.bias,
        "mlp_bias": spec.bias,
        "attention_dropout": spec.attention_dropout,
        "rope_parameters": rope,
        # transformers 4 reads these two, and transformers 5 `rope_parameters`
        "rope_theta": spec.rotary_base,
        "rope_scaling": None if factor is None else {"type": "linear", "factor": float(factor)},
    }


_CONFIGS = {"gpt2": _to_gpt2, "llama": _to_llama}


def from_config(config: dict[str, Any], file: Path) -> GPTSpec:
    """Return the model that a `config.json` describes; `file` is its path, for errors.

    Raises:
        CheckpointError: A key is missing or has a value that no model has, or no model of ours is
            the same.
    """
    kind = config.get("model_type")
    try:
        if kind == "gpt2":
            return _from_gpt2(Fields(config), file)
        if kind == "llama":
            return _from_llama(Fields(config), file)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(file, str(error), "Give the config.json of a model") from error
    hint = "Models of type gpt2 and llama can be imported"
    raise CheckpointError(file, f"model_type is {shown_value(kind)}", hint)


def _from_gpt2(c: Fields, file: Path) -> GPTSpec:
    function = c.text("activation_function", "gelu_new")
    activations = {theirs: ours for ours, theirs in _GPT2_ACTIVATIONS.items()}
    activation = activations.get(_GPT2_ALIASES.get(function, function))
    _only(file, c, "activation_function", activation is not None)
    _only(file, c, "scale_attn_weights", c.flag("scale_attn_weights", True))
    inverse = "scale_attn_by_inverse_layer_idx"
    _only(file, c, inverse, not c.flag(inverse, False))
    hidden, heads = c.whole("n_embd", 1, MAX_WIDTH), c.whole("n_head", 1, MAX_HEADS)
    _divides(c, "n_head", heads, "n_embd", hidden)
    return GPTSpec(
        num_layers=c.whole("n_layer", 1, MAX_LAYERS),
        hidden_size=hidden,
        ffn_hidden_size=c.whole("n_inner", 1, MAX_WIDTH, None) or 4 * hidden,
        num_attention_heads=heads,
        max_position_embeddings=c.whole("n_positions", 1, MAX_POSITIONS),
        vocab_size=c.whole("vocab_size", 1, MAX_VOCABULARY),
        init_method_std=c.number("initializer_range", 0.02, above=0),
        use_scaled_init_method=True,
        hidden_dropout=c.number("resid_pdrop", 0.1, at_least=0, below=1),
        attention_dropout=c.number("attn_pdrop", 0.1, at_least=0, below=1),
        ffn_dropout=0.0,
        layernorm_epsilon=c.number("layer_norm_epsilon", 1e-5, above=0, at_most=1),
        activation=activation,  # type: ignore[arg-type]  # checked above
        share_embeddings_and_output_weights=c.flag("tie_word_embeddings", True),
    )


def _from_llama(c: Fields, file: Path) -> GPTSpec:
    activations = {theirs: ours for ours, theirs in _LLAMA_ACTIVATIONS.items()}
    activation = activations.get(c.text("hidden_act", "silu"))
    _only(file, c, "hidden_act", activation is not None)
    bias = c.flag("attention_bias", False)
    _only(file, c, "mlp_bias", c.flag("mlp_bias", False) == bias)
    rope = Fields({**c.section("rope_scaling").tree, **c.section("rope_parameters").tree})
    rope_type = rope.tree.get("rope_type", rope.tree.get("type", "default"))
    if rope_type not in ("default", "linear"):
        hint = "Models with rope_type default or linear can be imported"
        raise CheckpointError(file, f"rope_type is {shown_value(rope_type)}", hint)
    heads = c.whole("num_attention_heads", 1, MAX_HEADS)
    groups = c.whole("num_key_value_heads", 1, MAX_HEADS, None) or heads
    _divides(c, "num_key_value_heads", groups, "num_attention_heads", heads)
    hidden, width = c.whole("hidden_size", 1, MAX_WIDTH), c.whole("head_dim", 1, MAX_WIDTH, None)
    if width is None:
        _divides(c, "num_attention_heads", heads, "hidden_size", hidden)
    theta = c.number("rope_theta", 10000.0, above=1)
    return GPTSpec(
        num_layers=c.whole("num_hidden_layers", 1, MAX_LAYERS),
        hidden_size=hidden,
        ffn_hidden_size=c.whole("intermediate_size", 1, MAX_WIDTH),
        num_attention_heads=heads,
        max_position_embeddings=c.whole("max_position_embeddings", 1, MAX_POSITIONS),
        vocab_size=c.whole("vocab_size", 1, MAX_VOCABULARY),
        init_method_std=c.number("initializer_range", 0.02, above=0),
        use_scaled_init_method=True,
        hidden_dropout=0.0,
        attention_dropout=c.number("attention_dropout", 0.0, at_least=0, below=1),
        ffn_dropout=0.0,
        layernorm_epsilon=c.number("rms_norm_eps", 1e-6, above=0, at_most=1),
        kv_channels=width or hidden // heads,
        num_query_groups=groups,
        normalization="rmsnorm",
        activation=activation,  # type: ignore[arg-type]  # checked above
        position_embedding_type="rope",
        rotary_base=rope.number("rope_theta", theta, above=1),
        seq_len_interpolation_factor=(
            rope.number("factor", at_least=1) if rope_type == "linear" else None
        ),
        bias=bias,
        share_embeddings_and_output_weights=c.flag("tie_word_embeddings", False),
    )


def _divides(c: Fields, key: str, small: int, of: str, large: int) -> None:
    if large % small:
        raise ForeignFileError(
            f"{key} is {shown_value(c.tree.get(key))}, which does not divide {of}"
        )


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


def _only(file: Path, config: Fields, key: str, fits: bool) -> None:
    if not fits:
        hint = "megafp8 has no such model; import one without this setting"
        raise CheckpointError(file, f"{key} is {shown_value(config.tree.get(key))}", hint)


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
