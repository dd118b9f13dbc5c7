"""Translate Megatron's data, its tokenizer, and where a run of Megatron's writes."""

from __future__ import annotations

import re
from typing import Any

from megafp8_migrate.megatron_settings import MegatronSettings
from megafp8_migrate.report import Migration

_DEFAULT_SPLIT = "969,30,1"
_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_LEAST_VOCABULARY = 257
_MODELS = {"HuggingFaceTokenizer": ("huggingface", "type"), "TikTokenizer": ("tiktoken", "model")}


def _data(s: MegatronSettings, m: Migration) -> None:
    parts = {"train": "train_data_path", "validation": "valid_data_path", "test": "test_data_path"}
    paths, mock = s.get("data_path"), s.get("mock_data")
    each = {name: _blend(s.get(flag)) for name, flag in parts.items() if s.get(flag)}
    split = s.get("split")
    if mock:
        m.change(s.label("mock_data"), True, {"model.data.data_prefix": "mock"})
    elif paths:
        m.change(s.label("data_path"), paths, {"model.data.data_prefix": _blend(paths)})
    elif each:
        names = [name for name in parts.values() if name in s.given]
        m.change(s.label(*names), "files of each split", {"model.data.data_prefix": each})
    elif not s.has("data_path"):
        m.decide("model.data.data_prefix", "???", "no data is named",
                 "Give a path without .bin, [weight, path, ...], or mock")  # fmt: skip
    numbers = re.findall(r"[.0-9]+", str(split)) if split is not None else []
    if mock or each:
        if split is not None:
            m.drop(s.label("split"), split, "it has no effect with this data")
    elif len(numbers) in (1, 2, 3):
        sizes = [*numbers, "0", "0"][:3]
        new: dict[str, Any] = {"model.data.splits_string": ",".join(sizes)}
        if float(sizes[1]) == 0:  # without documents Megatron validates nothing
            s.taken.add("eval_iters")
            new["trainer.limit_val_batches"] = 0
        m.change(s.label("split"), split, new)
    elif split is not None:
        m.decide(s.label("split"), split, "is not one to three numbers", "Give 900,50,50")
    elif s.source and not s.has("split"):
        m.assume("model.data.splits_string", _DEFAULT_SPLIT, s.source)
    kind = s.get("dataloader_type")
    if kind is not None:
        m.change(s.label("dataloader_type"), kind, {"model.data.dataloader_type": kind})
    if s.get("dataloader_inter_document_masking"):
        apart = {"model.data.reset_attention_mask": True, "model.data.reset_position_ids": True}
        s.taken |= {"reset_attention_mask", "reset_position_ids"}
        m.change(s.label("dataloader_inter_document_masking"), True, apart)


def _blend(paths: Any) -> Any:
    """Return `[weight, path, ...]` or one path; paths without weights have equal ones."""
    listed = paths if isinstance(paths, list) else [paths]
    if len(listed) == 1:
        return str(listed[0])
    is_weighted = not len(listed) % 2 and all(
        isinstance(item, int | float) and not isinstance(item, bool) for item in listed[::2]
    )
    return listed if is_weighted else [item for path in listed for item in (1, str(path))]


def _tokenizer(s: MegatronSettings, m: Migration) -> None:
    named, model = s.get("tokenizer_type"), s.get("tokenizer_model")
    kind = None if named is None else str(named)
    size = s.number("vocab_size", m)
    vocabulary, merges = s.get("vocab_file"), s.get("merge_file")
    label = s.label("tokenizer_type")
    if kind is None and (s.has("vocab_file") or s.has("merge_file")):
        kind, label = "GPT2BPETokenizer", s.label("vocab_file", "merge_file")
    key = "model.tokenizer."
    if kind == "GPT2BPETokenizer":
        new = {key + "library": "megatron", key + "type": kind}
        new |= {key + "vocab_file": vocabulary} if vocabulary else {}
        new |= {key + "merge_file": merges} if merges else {}
        m.change(label, kind, new)
    elif kind in _SENTENCEPIECE or kind in _MODELS:
        library, name = _MODELS.get(kind, ("sentencepiece", "model"))
        new = {key + "library": library} | ({key + name: model} if model else {})
        m.change(label, kind, new)
        if not model and not s.has("tokenizer_model"):
            m.decide(f"{key}{name}", "???", "is not given", "Give the tokenizer's file or name")
    elif kind == "NullTokenizer" and size is not None and s.get("mock_data"):
        if int(size) + 1 >= _LEAST_VOCABULARY:
            m.change(s.label("tokenizer_type", "vocab_size"), kind,
                     {key + "library": "builtin", key + "vocab_size": int(size) + 1},
                     note="the tokens and the one that ends a document")  # fmt: skip
        else:
            m.decide(s.label("vocab_size"), size, "is too small", "Give 256 or more")
        size = None
    elif s.source or kind is not None:
        m.decide(label, kind or "???", "names no tokenizer that megafp8 has",
                 "Give model.tokenizer.library with its files, or builtin")  # fmt: skip
    if size is not None:
        m.drop(s.label("vocab_size"), size, "the tokenizer determines the vocabulary")


def _files(s: MegatronSettings, m: Migration) -> None:
    save, load = s.get("save"), s.get("load")
    where_saved = save or s.unknown.get("save")
    where_loaded = load or s.unknown.get("load")
    if isinstance(save, str):
        m.change(s.label("save"), save, {"exp_manager.explicit_log_dir": save},
                 note="the run's directory, which has its logs too")  # fmt: skip
    elif where_saved:
        m.drop("--save", where_saved, "a run without exp_manager.name writes into runs/")
    elif s.source:
        m.assume("exp_manager.create_checkpoint_callback", False, "without --save none are written")
    if where_loaded and where_loaded == where_saved:
        m.drop("--load", where_loaded, "a run continues from its own checkpoints")
    elif where_loaded:
        m.decide("--load", where_loaded, "a run does not start from a checkpoint of Megatron's",
                 "Leave it out, or import its weights first (megafp8 import)")  # fmt: skip


def _records(s: MegatronSettings, m: Migration) -> None:
    board = "exp_manager.create_tensorboard_logger"
    if s.get("tensorboard_dir"):
        m.change(s.label("tensorboard_dir"), s.get("tensorboard_dir"), {board: True},
                 note="the files are in the run's directory")  # fmt: skip
    elif "tensorboard_dir" in s.unknown:
        m.change("--tensorboard-dir", s.unknown["tensorboard_dir"], {board: True},
                 note="the files are in the run's directory")  # fmt: skip
    if s.given.get("wandb_project", (0, None))[1] or "wandb_project" in s.unknown:
        m.change("--wandb-project", s.unknown.get("wandb_project", "given"),
                 {"exp_manager.create_wandb_logger": True})  # fmt: skip
    if not s.get("profile"):
        for name in ("profile_step_start", "profile_step_end"):
            if s.get(name) is not None:
                m.drop(s.label(name), s.get(name), "no profile is asked for")
        return
    first, last = s.number("profile_step_start", m, 10), s.number("profile_step_end", m, 12)
    steps = {"enabled": True, "start_step": first, "end_step": last}
    names = [n for n in ("profile", "profile_step_start", "profile_step_end") if n in s.given]
    m.change(s.label(*names), True, {f"model.nsys_profile.{k}": v for k, v in steps.items()})


DATA_RULES = (_data, _tokenizer, _files, _records)
