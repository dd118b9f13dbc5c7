"""Test that a downloaded model that is absurd, damaged or made to do harm is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megafp8.checkpoint import huggingface_files
from megafp8.cli.import_hf import main
from megafp8.errors import UserError
from megafp8.train.huggingface import import_model
from tests.foreign.made import into_cache, make_model

INF, NAN = float("inf"), float("nan")
ABSURD: list[tuple[str, Any]] = [
    ("n_layer", INF),
    ("n_layer", 2.7),
    ("n_layer", 10_000_000),
    ("n_layer", "2"),
    ("n_layer", 0),
    ("initializer_range", 1e308),
    ("n_layer", True),
    ("n_head", -2),
    ("n_head", 0),
    ("n_head", 3),
    ("n_embd", [16]),
    ("n_inner", INF),
    ("n_positions", None),
    ("vocab_size", 10**30),
    ("resid_pdrop", 2.0),
    ("resid_pdrop", 1.0),
    ("attn_pdrop", NAN),
    ("attn_pdrop", -0.1),
    ("layer_norm_epsilon", -1),
    ("layer_norm_epsilon", NAN),
    ("layer_norm_epsilon", "1e-5"),
    ("initializer_range", -1),
    ("initializer_range", INF),
    ("tie_word_embeddings", "false"),
    ("scale_attn_weights", "yes"),
    ("activation_function", ["gelu"]),
    ("eos_token_id", NAN),
    ("eos_token_id", -5),
    ("eos_token_id", [INF]),
    ("eos_token_id", "256"),
    ("model_type", {"gpt2": 1}),
]


@pytest.mark.parametrize(("key", "value"), ABSURD)
def test_an_absurd_value_is_refused_by_its_key(key: str, value: Any, tmp_path: Path) -> None:
    model = make_model(tmp_path / "theirs", **{key: value})
    with pytest.raises(UserError, match=key):
        import_model(model, tmp_path / "ours")


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 8,
    "vocab_size": 272,
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("intermediate_size", INF),
        ("rms_norm_eps", NAN),
        ("rope_theta", -1),
        ("head_dim", 2.5),
        ("attention_bias", "no"),
        ("rope_scaling", [1]),
        ("rope_scaling", {"type": "linear", "factor": NAN}),
        ("rope_scaling", {"type": "linear", "factor": 1e30}),
        ("rope_theta", 1e300),
        ("rope_scaling", {"type": ["linear"]}),
        ("attention_dropout", 1.5),
    ],
)
def test_an_absurd_llama_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {key: value}))
    with pytest.raises(UserError, match=r"config\.json"):
        import_model(tmp_path, tmp_path / "ours")


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.complex64, torch.float64, torch.float8_e4m3fn]
)
def test_weights_of_other_dtypes_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    change_weights(make_model(tmp_path / "theirs"), lambda w: torch.ones(w.shape).to(dtype))
    with pytest.raises(UserError, match="has the dtype"):
        import_model(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused(
    value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    def spoil(weight: torch.Tensor) -> torch.Tensor:
        weight = weight.to(dtype)
        weight.view(-1)[3] = value
        return weight

    change_weights(make_model(tmp_path / "theirs"), spoil)
    with pytest.raises(UserError, match=r"ln_f\.weight has NaN or infinite values"):
        import_model(tmp_path / "theirs", tmp_path / "ours")


def change_weights(model: Path, change: Any) -> None:
    tensors = load_file(model / "model.safetensors")
    name = "transformer.ln_f.weight"
    tensors[name] = change(tensors[name])
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


PRIVATE = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"]
PRIVATE += ["chat_template.jinja", "special_tokens_map.json", "config.json", "model.safetensors"]


@pytest.mark.parametrize("kind", ["link", "FIFO", "device"])
@pytest.mark.parametrize("name", PRIVATE)
def test_a_link_or_special_file_of_a_model_is_refused(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, secret = make_model(tmp_path / "theirs"), tmp_path / "secret.txt"
    (model / name).unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(model / name)
    else:
        secret.write_text("my secret")
        (model / name).symlink_to(secret if kind == "link" else "/dev/zero")
    assert main([str(model), str(tmp_path / "ours")]) == 2
    assert name in capsys.readouterr().err
    assert not list((tmp_path / "ours").rglob("*.*"))


def test_a_file_of_the_index_that_is_special_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "theirs")
    os.mkfifo(model / "part.safetensors")
    index = {"weight_map": {"transformer.ln_f.weight": "part.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"part\.safetensors is a FIFO|part\.safetensors: it is a"):
        import_model(model, tmp_path / "ours")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 5000,
        '{"weight_map": ' + "[" * 200 + "]" * 200 + "}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": "../x"}}',
        '{"weight_map": {"a": "x\\u0000"}}',
        '{"weight_map": {"a": null}}',
        "{}",
        "[]",
        "\x00",
    ],
)
def test_an_index_that_is_damaged_is_refused(text: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "theirs")
    (model / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError):
        import_model(model, tmp_path / "ours")


def test_a_snapshot_of_the_cache_is_imported(tmp_path: Path) -> None:
    plain = make_model(tmp_path / "plain")
    snapshot = into_cache(make_model(tmp_path / "theirs"), tmp_path / "hub")
    import_model(plain, tmp_path / "one")
    import_model(snapshot, tmp_path / "two")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copied = tmp_path / "two" / name
        assert not copied.is_symlink()
        assert copied.read_bytes() == (plain / name).read_bytes()
    (one,), (two,) = (
        list((tmp_path / folder / "checkpoints").glob("*/model0.safetensors"))
        for folder in ("one", "two")
    )
    assert one.read_bytes() == two.read_bytes()


HEADS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one value": lambda word: word.index_put(
        (torch.tensor(270), torch.tensor(3)), torch.tensor(7.0)
    ),
    "zeros": torch.zeros_like,
    "fewer rows": lambda word: word[:-1],
    "other rows": lambda word: word.flip(0) + torch.arange(272)[:, None],
}


@pytest.mark.parametrize("how", HEADS)
def test_a_head_that_a_tied_model_does_not_use_is_refused(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5 computes with it, and transformers 4 without; an equal one is read."""
    monkeypatch.setattr(huggingface_files, "_READ_BYTES", 1024)  # some rows at a time
    file = make_model(tmp_path / "theirs") / "model.safetensors"
    tensors = load_file(file)
    for equal in (tensors["transformer.wte.weight"], tensors["transformer.wte.weight"].bfloat16()):
        word = equal.float()  # so that the embedding is one that BF16 holds, too
        save_file(tensors | {"transformer.wte.weight": word, "lm_head.weight": equal.clone()}, file)
        import_model(tmp_path / "theirs", tmp_path / str(equal.dtype))
    head = HEADS[how](word.clone())
    save_file(tensors | {"transformer.wte.weight": word, "lm_head.weight": head.contiguous()}, file)
    with pytest.raises(UserError, match="lm_head.weight is not transformer.wte.weight, and config"):
        import_model(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    config = tmp_path / "theirs" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    if how != "fewer rows":
        assert import_model(tmp_path / "theirs", tmp_path / "untied").spec.vocab_size == 272
