"""Test `data_prefix` in its three forms, and which tokenizer settings belong together."""

from __future__ import annotations

from pathlib import Path

import pytest

from megafp8.config.data_values import parse_data_prefix, prefixes_in
from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.config.resume import changed_settings, check_continues, identity
from megafp8.specs.data import SeparateSplits, Weighted
from tests.config.helpers import run_spec, the_problem

PREFIX = "model.data.data_prefix"


def test_the_three_forms_on_the_command_line() -> None:
    assert run_spec(f"{PREFIX}=/data/a").data.prefix == "/data/a"
    blend = run_spec(f"{PREFIX}=[0.3,/data/a,7e-1,/data/b]").data.prefix
    assert blend == (Weighted("0.3", "/data/a"), Weighted("0.7", "/data/b"))
    assert run_spec(f"{PREFIX}=[/data/a]").data.prefix == "/data/a"
    split = run_spec(f"{PREFIX}={{train:[1,/a,3,/b],validation:/c,test:[/d]}}").data.prefix
    assert split == SeparateSplits(
        train=(Weighted("1", "/a"), Weighted("3", "/b")),
        validation=(Weighted("1", "/c"),),
        test=(Weighted("1", "/d"),),
    )
    assert prefixes_in({"train": [1, "/a", 3, "/b"], "validation": "/c"}) == ("/a", "/b", "/c")


@pytest.mark.parametrize(
    "value", ["[1,/a]", "[0.3,/data/a,0.7,/data/b]", "{train:[/a],validation:[1,/b,2,/c]}"]
)
def test_a_resolved_tree_loads_again_as_itself(value: str, tmp_path: Path) -> None:
    spec = run_spec(f"{PREFIX}={value}")
    from omegaconf import OmegaConf

    start = "defaults:\n  - pretrain_gpt\n  - _self_\n\n"
    (tmp_path / "again.yaml").write_text(start + OmegaConf.to_yaml(OmegaConf.create(spec.resolved)))
    again = resolve(load((), config_dir=tmp_path, config_name="again"), lambda: False)
    assert again.data == spec.data and identity(again.resolved) == identity(spec.resolved)


SIZE = "model.tokenizer.vocab_size"
SENTENCEPIECE = ["model.tokenizer.library=sentencepiece", "model.tokenizer.model=t.model"]


@pytest.mark.parametrize(
    "prefix", ["/data/a", "[0.3,/data/a,0.7,/data/b]", "{train:[/a],validation:[1,/b,2,/c]}"]
)
def test_own_data_have_a_vocabulary_already(prefix: str) -> None:
    """The number was accepted beside a dataset of files, and changed nothing."""
    problem = the_problem(f"{PREFIX}={prefix}", f"{SIZE}=300")
    assert problem.key == SIZE and problem.value == 300
    assert "no effect" in problem.reason and "Leave it out" in problem.hint
    assert run_spec(f"{PREFIX}={prefix}").data.prefix
    assert run_spec(f"{PREFIX}={prefix}", f"{SIZE}=4096").data.prefix, "the default says nothing"


def test_a_named_tokenizer_has_a_vocabulary_already() -> None:
    problem = the_problem(f"{PREFIX}=mock", f"{SIZE}=300", *SENTENCEPIECE)
    assert problem.key == SIZE and "model.tokenizer.library=builtin" in problem.hint


@pytest.mark.parametrize("prefix", ["builtin", "mock", "[0.3,/data/a,0.7,builtin]"])
def test_the_built_in_tokenizer_has_the_size_that_is_given(prefix: str) -> None:
    assert run_spec(f"{PREFIX}={prefix}", f"{SIZE}=300").data.tokenizer.vocab_size == 300


def test_a_run_whose_settings_record_such_a_size_continues() -> None:
    """Older versions recorded a size that had no effect on the run."""
    new = run_spec(f"{PREFIX}=/data/a").resolved
    tokenizer = {**new["model"]["tokenizer"], "vocab_size": 300}
    old = {**new, "model": {**new["model"], "tokenizer": tokenizer}}
    check_continues(old, new, run="runs/x")
    assert changed_settings(old, new) == []


def test_equal_blends_have_equal_identities() -> None:
    one, two = (
        identity(run_spec(f"{PREFIX}={v}").resolved) for v in ("[1,/a,3,/b]", "[1.0,/a,'3.0',/b]")
    )
    assert one == two
    assert one != identity(run_spec(f"{PREFIX}=[3,/a,1,/b]").resolved)


@pytest.mark.parametrize(
    "value",
    [
        "", 3, None, True, [], ["/a", "/b"], [1, "/a", 2], [0, "/a", 1, "/b"], [-1, "/a"],
        ["/a", 1], [float("nan"), "/a"], ["x", "/a"], [1, 2], [1, ""], {"train": ["/a"]}, {},
        {"train": ["/a"], "validation": []}, {"train": "/a", "validation": "/b", "oops": "/c"},
        {"train": "/a", "validation": "/b", "test": [3]}, [1e99, "/a", 1, "/b"],
    ],
)  # fmt: skip
def test_other_forms_are_none(value: object) -> None:
    assert parse_data_prefix(value) is None


@pytest.mark.parametrize("value", ["[/a,/b]", "[0,/a,1,/b]", "{train:[/a]}", "[1,/a,2]"])
def test_other_forms_are_refused_by_name(value: str) -> None:
    problem = the_problem(f"{PREFIX}={value}")
    assert problem.key == PREFIX and "[weight, path" in str(problem)


# ---- tokenizers

DATA = f"{PREFIX}=/data/a"


def test_a_tokenizer_by_name() -> None:
    spec = run_spec(
        DATA, "model.tokenizer.library=huggingface", "model.tokenizer.type=gpt2"
    ).data.tokenizer
    assert (spec.library, spec.type) == ("huggingface", "gpt2")
    files = ("model.tokenizer.vocab_file=v.json", "model.tokenizer.merge_file=m.txt")
    spec = run_spec(DATA, "model.tokenizer.library=megatron", *files).data.tokenizer
    assert (spec.vocab_file, spec.merge_file) == ("v.json", "m.txt")


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (("library=huggingface",), "type"),
        (("library=huggingface", "type=GPT2BPETokenizer"), "type"),
        (("library=sentencepiece",), "model"),
        (("library=tiktoken",), "model"),
        (("library=megatron", "vocab_file=v.json"), "merge_file"),
        (("model=m.model",), "model"),
        (("type=gpt2",), "type"),
        (("library=sentencepiece", "model=m", "merge_file=x"), "merge_file"),
    ],
)
def test_what_a_library_needs_and_what_it_does_not_heed(given: tuple[str, ...], key: str) -> None:
    problem = the_problem(DATA, *(f"model.tokenizer.{setting}" for setting in given))
    assert problem.key == f"model.tokenizer.{key}" and problem.hint


def test_the_builtin_corpus_keeps_its_tokenizer() -> None:
    given = ("model.tokenizer.library=tiktoken", "model.tokenizer.model=gpt2")
    for prefix in ("builtin", "[1,builtin,2,/a]"):
        assert the_problem(f"{PREFIX}={prefix}", *given).key == "model.tokenizer.library"


def test_switches_reach_the_data() -> None:
    plain = run_spec().data
    for name in (
        "reset_position_ids",
        "reset_attention_mask",
        "eod_mask_loss",
        "validation_drop_last",
        "shuffle_documents",
    ):
        before = getattr(plain, name)
        after = getattr(run_spec(f"model.data.{name}={not before}").data, name)
        assert after is not before
    assert run_spec("model.data.dataloader_type=cyclic").data.dataloader_type == "cyclic"
    assert run_spec("model.data.num_workers=0").data.num_workers == 0
    assert the_problem("model.data.dataloader_type=batch").key == "model.data.dataloader_type"
