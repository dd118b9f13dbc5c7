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
        ["/a", 1], [float("nan"), "/a"], ["x", "/a"], [1, 2], [1, ""], {}, {"validation": ["/a"]},
        {"train": [], "validation": ["/a"]}, {"train": "/a", "validation": "/b", "oops": "/c"},
        {"train": "/a", "validation": "/b", "test": [3]}, [1e99, "/a", 1, "/b"],
    ],
)  # fmt: skip
def test_other_forms_are_none(value: object) -> None:
    assert parse_data_prefix(value) is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("[/a,/b]", "has no weights: write [1, /a, 1, /b]"),
        ("[0,/a,1,/b]", "gives /a the weight 0, so that it would never be read: leave it out"),
        ("['0.0',/a,1,/b]", "gives /a the weight 0, so that"),
        ("[1,/a,2]", "has 3 elements, which are no pairs of a weight and a path"),
        ("'0.3 /a 0.7'", "has 3 elements, which are no pairs"),
        ("[1,/a,.nan,/b]", "has .nan where the weight of /b belongs"),
        ("[1,/a,nan,/b]", "gives /b the weight nan, not a finite number"),
        ("[1,/a,inf,/b]", "gives /b the weight inf, not a finite number"),
        ("[1,/a,-2,/b]", "gives /b the weight -2, not a finite number"),
        ("[1,/a,1e99,/b]", "gives /b the weight 1e+99, not a finite number of usual size"),
        ("[/a,1,/b,2]", "has /a where the weight of 1 belongs"),
        ("[true,/a]", "has True where the weight of /a belongs"),
        ("[1,2,3,4]", "has 2 where the path of the weight 1 belongs"),
        ("[1,'',2,/b]", "has an empty path"),
        ("[]", "names no dataset"),
        ("{validation:[/a]}", "names no data to train on"),
        ("{train:/a,valid:/b}", "has the unknown split valid"),
        ("{train:[1,/a],validation:[0,/b,1,/c]}", "validation: gives /b the weight 0"),
        ("{train:[/a],validation:[/b],test:[1]}", "test: has 1 elements"),
    ],
)
def test_what_is_wrong_in_a_blend_is_said(value: str, said: str) -> None:
    problem = the_problem(f"{PREFIX}={value}")
    assert problem.key == PREFIX and said in problem.reason, problem.reason
    assert "[weight, path" in str(problem)


@pytest.mark.parametrize(
    ("value", "want"),
    [
        ("'0.3 /a 0.7 /b'", (Weighted("0.3", "/a"), Weighted("0.7", "/b"))),
        ("['0.3 /a 0.7 /b']", (Weighted("0.3", "/a"), Weighted("0.7", "/b"))),
        ("'1 /a'", "/a"),
        ("'my data/a'", "my data/a"),
        ("'data of 2024/a'", "data of 2024/a"),
        ("'2024'", "2024"),
    ],
)
def test_a_blend_in_one_text_is_megatrons(value: str, want: object) -> None:
    assert run_spec(f"{PREFIX}={value}").data.prefix == want
    split = run_spec(f"{PREFIX}={{train: {value}, validation: /c}}").data.prefix
    assert isinstance(split, SeparateSplits)
    assert split.train == (want if isinstance(want, tuple) else (Weighted("1", want),))


SPLITS, LIMIT = "model.data.splits_string", "trainer.limit_val_batches"


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("'99,1'", (99, 1, 0)), ("'99,1,0'", (99, 1, 0)), ("'100,0,0'", (100, 0, 0)),
        ("100", (100, 0, 0)), ("[99,1]", (99, 1, 0)), ("'949/50/1'", (949, 50, 1)),
        ("'1.0,0.0'", (1, 0, 0)), ("' 99 , 1 '", (99, 1, 0)),
    ],
)  # fmt: skip
def test_splits_have_one_to_three_numbers(given: str, want: tuple[float, ...]) -> None:
    data = run_spec(f"{SPLITS}={given}", f"{LIMIT}=0").data
    assert data.splits == want and not data.validates
    same = f"[{','.join(map(str, want))}]"
    one, other = (run_spec(f"{SPLITS}={value}", f"{LIMIT}=0") for value in (given, same))
    assert one.resolved == other.resolved


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ((f"{SPLITS}='100,0,0'",), SPLITS),
        ((f"{SPLITS}='99,0,1'", f"{LIMIT}=2"), SPLITS),
        ((f"{SPLITS}='100'", f"{LIMIT}=1.0"), SPLITS),
        ((f"{SPLITS}='100,0,0'", f"{LIMIT}=0", "trainer.num_sanity_val_steps=1"), SPLITS),
        ((f"{PREFIX}={{train:[/a]}}",), PREFIX),
        ((f"{PREFIX}={{train:[/a],validation:null}}", f"{LIMIT}=3"), PREFIX),
        ((f"{PREFIX}={{train:[/a],validation:[]}}",), PREFIX),
    ],
)
def test_validation_without_data_is_refused_by_name(given: tuple[str, ...], key: str) -> None:
    problem = the_problem(*given)
    assert problem.key == key and "to validate on" in problem.reason
    assert f"Set {LIMIT}=0" in problem.hint


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


@pytest.mark.parametrize("name", ["bpe", "bytes"])
def test_a_tokenizer_of_preprocess_is_no_library_and_the_error_says_so(name: str) -> None:
    problem = the_problem(f"model.tokenizer.library={name}")
    assert "data of megafp8 preprocess --tokenizer bpe or bytes" in problem.hint
