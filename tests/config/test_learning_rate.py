"""A model that is much wider than the default job's is not trained at the default job's rate."""

from __future__ import annotations

from pathlib import Path

import pytest

from megafp8.cli import dryrun, plan
from megafp8.config.load import load, load_all
from megafp8.errors import ConfigError

RATE = "model.optim.lr"
WIDE = ["model.hidden_size=2048", "model.ffn_hidden_size=8192", "model.num_attention_heads=16"]
BEGINS = "defaults: [pretrain_gpt, _self_]\n"
MODEL = "model: {hidden_size: 2048, ffn_hidden_size: 8192, num_attention_heads: 16"


def yaml(folder: Path, text: str) -> Path:
    (folder / "mine.yaml").write_text(text)
    return folder


def test_a_wide_model_asks_for_its_rate(tmp_path: Path) -> None:
    """The rate in the hint is the default job's, times 256 / 2048."""
    said = (
        r"model\.optim\.lr=0\.002: is the rate of the default job, whose model has "
        r"model\.hidden_size=256; this one has 2048, .* model\.optim\.lr=2\.5e-4 "
        r"model\.optim\.sched\.min_lr=2\.5e-5\. model\.optim\.lr=0\.002 keeps it"
    )
    with pytest.raises(ConfigError, match=said):
        load_all(WIDE)
    with pytest.raises(ConfigError, match=said):
        load_all([], yaml(tmp_path, BEGINS + MODEL + "}\n"), "mine")
    hinted = ["model.optim.lr=2.5e-4", "model.optim.sched.min_lr=2.5e-5"]
    assert load([*WIDE, *hinted])["model.optim.lr"] == 2.5e-4, "what the hint says is accepted"


@pytest.mark.parametrize(
    "words",
    [
        [*WIDE, "model.optim.lr=0.002"],
        [*WIDE, "trainer.fast_dev_run=True"],
        ["model.hidden_size=512", "model.num_attention_heads=8"],
        ["model.hidden_size=64"],
        ["model.num_layers=24"],
        ["model=gpt3_1.3b"],
        [],
    ],
)
def test_who_gives_a_rate_or_keeps_about_the_width_is_not_asked(words: list[str]) -> None:
    load(words)


def test_a_file_with_a_rate_is_not_asked(tmp_path: Path) -> None:
    folder = yaml(tmp_path, BEGINS + MODEL + ", optim: {lr: 2e-3}}\n")
    assert load([], folder, "mine")["model.optim.lr"] == 2e-3


def test_what_trains_nothing_needs_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    load_all(WIDE, trains=False)
    assert plan.main(WIDE) == 0
    layer = ["model.num_layers=1", "model.tokenizer.vocab_size=300", "--vocab-size=300"]
    assert dryrun.main([*WIDE, *layer]) == 0
    assert plan.main([*WIDE, "model.num_layers=0"]) == 2
    assert RATE not in capsys.readouterr().err
