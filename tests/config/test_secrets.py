"""Test that keys and tokens appear in no message and in no file."""

from __future__ import annotations

from pathlib import Path

import pytest

from megafp8.cli.main import run_app
from megafp8.config.nemo import nemo_keys
from megafp8.config.schema import all_keys
from megafp8.config.secrets import hide, is_secret_name, variable_in
from tests.config.helpers import the_problem

PLANTED = "hf_pLaNtEd0123456789"


def test_names() -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "x.api_key", "aws-secret", "my.password", "apikey"):
        assert is_secret_name(name), name
    for name in (*all_keys(), *nemo_keys(), "num_tokens", "tokenizer", "TOKENIZERS_PARALLELISM"):
        assert not is_secret_name(name), name


@pytest.mark.parametrize(
    "text",
    [
        f"api_key={PLANTED}",
        f"x.api_key={PLANTED} and more",
        f"{{'hf_token': '{PLANTED}', 'other': 1}}",
        f'wandb.password: "{PLANTED} two words"',
        f"WANDB_API_KEY={PLANTED}",
    ],
)
def test_what_is_named_like_a_secret_is_hidden(text: str) -> None:
    assert PLANTED not in hide(text) and "two words" not in hide(text)


def test_ordinary_text_is_left_as_it_is() -> None:
    for text in ("model.tokenizer.library=builtin", "12 tokens: 3", "loss 3.2 | 8.1k tok/s"):
        assert hide(text) == text


def test_a_value_of_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    assert variable_in(f"x{PLANTED}") == "HF_TOKEN" and variable_in("x") is None
    for name in ("exp_manager.name", "exp_manager.wandb_logger_kwargs.project"):
        problem = the_problem(f"{name}=${{oc.env:HF_TOKEN}}")
        assert problem.key == name and "HF_TOKEN" in problem.reason
        assert PLANTED not in str(problem) + repr(problem) + str(vars(problem))


@pytest.mark.parametrize(
    "args",
    [
        [f"+something.api_key={PLANTED}"],
        [f"++model.hf_token='{PLANTED}'"],
        [f"+model={{api_key:{PLANTED}}}"],
        [f"~x.api_key={PLANTED}"],
        [f"model.optim.lr={PLANTED}", f"+x.token={PLANTED}"],
        [f"exp_manager.wandb_logger_kwargs.api_key={PLANTED}"],
        [f"+x.api_key={PLANTED},other", "-m"],
        [f"+hydra.job.env_set.HF_TOKEN={PLANTED}", "-m"],
        [f"+x.secret=[{PLANTED}"],
    ],
)
def test_refusals_do_not_show_it(
    args: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "model.optim.lr" in args[0]:
        monkeypatch.setenv("WANDB_API_KEY", PLANTED)
    assert run_app(args, lambda cfg, info: 0) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and PLANTED not in shown.err + shown.out
    assert not list(tmp_path.iterdir())


def test_secrets_of_a_file_are_refused_and_not_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"defaults: [pretrain_gpt, _self_]\nwandb: {{api_key: {PLANTED}}}\n"
    )
    assert run_app(["-cd", str(tmp_path), "-cn", "mine"], lambda cfg, info: 0) == 2
    assert PLANTED not in capsys.readouterr().err
