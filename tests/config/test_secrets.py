"""Test that keys and tokens appear in no message and in no file."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from megafp8 import secrets
from megafp8.cli.main import AppInfo, run_app
from megafp8.config import load as load_module
from megafp8.config.load import Loaded
from megafp8.config.merged import default_values
from megafp8.config.nemo import nemo_keys
from megafp8.config.schema import all_keys
from megafp8.secrets import hide, hide_values, is_secret_name, redacted, variable_in
from tests.config.helpers import load_problems, the_problem
from tests.foreign.fuzz import limited

ROOT = Path(__file__).parents[2]
PLANTED = "hf_pLaNtEd0123456789"


NAMED_LIKE_SECRETS = """
HF_TOKEN WANDB_API_KEY x.api_key aws-secret my.password apikey api-key X-Api-Key api_keys apiKey
APIKey OPENAI_API_KEYS env[api-key] x.api-key.y access-key private-key accessKey secretKey
sshkey GITHUB_PAT gitlab_pat DB_PASS userPass SMTP_PASS SSHPASS db_pwd MYSQL_PWD PGPASSWORD
dbPassword passwords DB_PASS_PROD OPENAI_KEY anthropic-key cohereKey SSH_KEY_PATH AUTH
basic_auth OAUTH Authorization COOKIE Set-Cookie session_cookie clientSecret client-secret JWT
credentials Creds authToken HfToken hf-token HFToken TOKENS HF_TOKENS api_token2 bot_token
HF_TOKEN_FILE AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN id_token refreshToken
""".split()

NAMED_LIKE_NONE = """
tokenizer TOKENIZERS_PARALLELISM num_tokens max_tokens maxNewTokens numTokens tokens_per_second
tokensPerSecond bytes_per_token consumed_tokens val_tokens tokens_in_all token_id token_type_ids
eos_token bos_token_id additional_special_tokens token_dispatcher embed_tokens tiktoken
subtokens key keys key_value kv_channels key_padding_mask query_key_layer sort_key primary_key
text_key label_key json_keys inert_keys public_key monkey donkey keyboard pass_through
passthrough forward_pass num_passes bypass compass passed author authors authority pattern path
patience pwd PWD OLDPWD SSH_AUTH_SOCK cookbook secretary
""".split()


def test_names() -> None:
    assert [name for name in NAMED_LIKE_SECRETS if not is_secret_name(name)] == []
    assert [name for name in NAMED_LIKE_NONE if is_secret_name(name)] == []


def test_no_setting_of_ours_or_nemos_is_named_like_a_secret() -> None:
    names = {*all_keys(), *nemo_keys()}
    assert len(names) > 500
    assert [name for name in sorted(names) if is_secret_name(name)] == []
    tree = {name: name for name in names}
    assert redacted(tree) == tree


@pytest.mark.parametrize("name", NAMED_LIKE_SECRETS)
def test_settings_texts_and_addresses_know_the_same_names(name: str) -> None:
    """A setting of that name, below it, a text with `name=value` and the query of an address."""
    value = "planted-0123"
    tree = {name: value, "x": [{name: {"y": (value, 12345678, None, True)}}]}
    safe_tree = {name: "***", "x": [{name: {"y": ("***", "***", None, True)}}]}
    assert redacted(tree) == safe_tree
    address = f"https://host/x?a=1&{name}={value}&b=2"
    texts = [address, f"{name}={value}", f'"{name}": "{value}"', f"--{name} {value} --b 2"]
    for text in texts if name.replace("-", "_").isidentifier() else texts[1:3]:
        for safe in (hide(text), redacted(text), redacted({"a": (text,)})["a"][0]):
            assert value not in safe and "***" in safe
            assert ("b=2" in text, "--b 2" in text) == ("b=2" in safe, "--b 2" in safe)


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("https://planted@host/x", "https://***@host/x"),
        ("git+https://planted:@host/x", "git+https://***@host/x"),
        ("https://me:planted@host", "https://***@host"),
        ("postgres://me:pla@nted@host/x", "postgres://***@host/x"),
        ("redis://:planted@host:6379/0", "redis://***@host:6379/0"),
        ("https://host/x?key=planted&a=1#access_token=planted", "https://host/x?key=***&a=1#access_token=***"),
        ("https://host/x?sv=1&sig=planted%3D.", "https://host/x?sv=1&sig=***."),
        ("host/x?a=1&token=planted", "host/x?a=1&token=***"),
        ("Authorization: Bearer planted", "Authorization: ***"),
        ("'Cookie': 'a=planted; b=planted' and", "'Cookie': *** and"),
        ('env["API_KEY"] = "planted"', 'env["API_KEY"] = ***'),
        ("api_keys=[planted, planted] x", "api_keys=*** x"),
        (r"{\"api_key\": \"planted\"}", r"{\"api_key\": ***}"),
        ("x=api_key=planted", "x=api_key=***"),
        ("['--hf-token', 'planted', 'x']", "['--hf-token', '***, 'x']"),
        ("the API key: planted: is wrong", "the API key: ***: is wrong"),
        ("key 'api_key': planted", "key 'api_key': ***"),
        (f"wandb key={'0123456789abcdef0123' * 2}", "wandb key=***"),
        (f"a {'hf_' + 'aBcD' * 8 + 'eF'} b", "a *** b"),
        (f"a sk-proj-{'aB3d' * 6}, AKIA{'ABCD' * 4} and ghp_{'a1B2' * 9}", "a ***, *** and ***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nplanted\n-----END RSA PRIVATE KEY----- x", "*** x"),
    ],
)  # fmt: skip
def test_settings_and_texts_are_hidden_alike(text: str, safe: str) -> None:
    assert hide(text) == safe == redacted(text) == hide(safe)
    assert redacted({"a": [text], text: None}) == {"a": [safe], safe: None}


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
    for text in (
        "model.tokenizer.library=builtin", "12 tokens: 3", "loss 3.2 | 8.1k tok/s", "--tokens N",
        "nats per token: 3.2", "all of its tokens: they", "tokens=15T", "--tokens=nan: no",
        "tokens=0: no", "ssh://git@host/x",
        "http://localhost:80/x@y", "https://host/@user/x", "token == end", "the backward pass: its",
        "task-12345678901234567890 hf_model_name_or_path", "x.y[key='a']", "s3://a/b",
    ):  # fmt: skip
        assert hide(text) == text == redacted(text)
    value = {"tokens": 5, "hf_token": "${a.b}", "t": ("a", 1), "n": [None, True, 2.5]}
    assert redacted(value) == value
    assert redacted({"password": "${oc.env:X,planted}"}) == {"password": "***"}


def test_the_documentation_has_no_text_that_would_be_hidden() -> None:
    for page in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/guide/*.md"),
        *ROOT.glob("docs/reference/*.md"),
    ):
        lines = page.read_text(encoding="utf-8").splitlines()
        lines = [line for line in lines if "…" not in line]  # which stands for a secret
        assert hide("\n".join(lines)).split("\n") == lines, page


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


SECRET = "${oc.env:HF_TOKEN}"
SHAPES = {
    "text": SECRET,
    "in a text": f"/data/{SECRET}/x",
    "in a list": [1, f"/data/{SECRET}/x"],
    "in a section": {"a": {"b": [SECRET]}},
    "a name": {PLANTED: 1},
    "below a secret name": {"api_key": PLANTED},
    "literal": PLANTED,
}
"""The forms in which a secret stands in a value; the last three need no environment."""


def tree(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the sections of settings that are given by their dotted keys."""
    made: dict[str, Any] = {}
    for path, value in settings.items():
        *sections, name = path.split(".")
        node = made
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return made


def leaves_nothing(folder: Path, shown: str) -> bool:
    """Whether the planted secret is in no shown byte, no file and no name of a file."""
    files = [path for path in folder.rglob("*") if path.name not in ("mine.yaml", "evil.yaml")]
    content = [path.read_bytes() for path in files if path.is_file()]
    texts = [shown.encode(), *(str(path.relative_to(folder)).encode() for path in files), *content]
    return all(PLANTED.encode() not in text for text in texts)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return an empty folder to work in, with a secret in the environment."""
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("more", [["--cfg", "job"], ["-m", "model.seed=1,2"]])
def test_no_key_of_the_schema_holds_a_secret(
    shape: str, more: list[str], planted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every key at once: each refusal is a line, and none shows the secret."""
    given = {key: SHAPES[shape] for key in all_keys()}
    text = "defaults: [pretrain_gpt, _self_]\n" + yaml.safe_dump(tree(given))
    (planted / "mine.yaml").write_text(text)
    assert run_app(["-cd", ".", "-cn", "mine", *more], lambda cfg, info: 0) == 2
    shown = capsys.readouterr()
    assert "error: " in shown.err and leaves_nothing(planted, shown.out + shown.err)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("exp_manager.name", f"a-{SECRET}"),
        ("model.data.data_prefix", [1, f"/data/{SECRET}/x"]),
        ("model.data.train_ds.file_names", [f"{SECRET}.jsonl"]),
        ("model.data.data_prefix", "https://me:pass-word@host/x"),
        ("restore_from_path", "${env_vars.HF_TOKEN}"),
    ],
)
def test_a_setting_that_is_recorded_holds_no_secret(key: str, value: Any, planted: Path) -> None:
    others = {"env_vars.HF_TOKEN": "from-the-file-itself"}
    given = "defaults: [pretrain_gpt, _self_]\n" + yaml.safe_dump(tree({key: value, **others}))
    (planted / "mine.yaml").write_text(given)
    (problem,) = load_problems(config_dir=planted, config_name="mine")
    assert problem.key == key and "would be recorded" in problem.reason
    for secret in (PLANTED, "pass-word", "from-the-file"):
        assert secret not in str(problem) + repr(problem) + str(vars(problem))


def test_inert_settings_are_shown_without_their_secrets(
    planted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every key of NeMo that takes any text or section, and Hydra's own section."""
    given: dict[str, Any] = {
        key: value
        for key, nemo in nemo_keys().items()
        for value in (SHAPES["in a section"], SHAPES["in a text"])
        if nemo.free is not None and nemo.free.accepts(value)
    }
    named = ("WANDB_API_KEY", "MY_PASSWORD", "wandb-api-key", "GITHUB_PAT", "hfToken", "AUTH")
    given |= {f"env_vars.{name}": PLANTED[::-1] for name in named}
    given |= {"name": f"{SECRET}-${{env_vars.MY_PASSWORD}}", "hydra.job.env_set.HF_TOKEN": PLANTED}
    given.pop("env_vars", None)
    assert len(given) > 10
    text = "defaults: [pretrain_gpt, _self_]\n" + yaml.safe_dump(tree(given))
    (planted / "mine.yaml").write_text(text)
    records: list[str] = []

    def task(loaded: Loaded, info: AppInfo) -> int:
        text = "\n".join(info.inert) + OmegaConf.to_yaml(loaded.cfg)
        records.append(json.dumps(info.record) + text)
        return 0

    words = ["-cd", ".", "-cn", "mine"]
    assert run_app([*words, "--cfg", "job"], task) == 0 and run_app(words, task) == 0
    del given["hydra.job.env_set.HF_TOKEN"]  # which a sweep refuses
    text = "defaults: [pretrain_gpt, _self_]\n" + yaml.safe_dump(tree(given))
    (planted / "mine.yaml").write_text(text)
    assert run_app([*words, "-m", "model.seed=1,2"], task) == 0
    shown = capsys.readouterr()
    everything = shown.out + shown.err + "".join(records)
    assert "env_vars" in everything and "***" in everything and len(records) == 3
    assert leaves_nothing(planted, everything) and PLANTED[::-1] not in everything
    (written,) = planted.rglob("multirun.yaml")
    assert "***" in written.read_text() and PLANTED[::-1] not in written.read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["exp_manager.name=" + PLANTED],
        ["model.data.data_prefix=[1,/data/" + PLANTED + "/x]"],
        ["env_vars={WANDB_API_KEY:other_planted}"],
        ["-cd", f"/home/{PLANTED}"],
        ["-cn", PLANTED],
        [f"--{PLANTED}"],
        ["model.data.data_prefix=https://me:other_planted@host/x"],
        ["-cd", "https://me:other_planted@host/x"],
    ],
)
@pytest.mark.parametrize("more", [[], ["-m"], ["--cfg", "job"]])
def test_a_command_line_holds_no_secret(
    words: list[str], more: list[str], planted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app([*words, *more], lambda cfg, info: 0) == 2
    shown = capsys.readouterr()
    assert leaves_nothing(planted, shown.out + shown.err)
    assert "other_planted" not in shown.out + shown.err and "secret" in shown.err.lower()


@pytest.mark.parametrize(
    "section",
    [
        {"sweep": {"dir": f"there/{SECRET}"}},
        {"sweep": {"subdir": SECRET + "/${hydra.job.num}"}},
        {"sweeper": {"params": {"env_vars.HF_TOKEN": "other_planted"}}},
        {"launcher": {"name": PLANTED}},
        {"job": {"env_set": {"HF_TOKEN": "other_planted"}}},
    ],
)
def test_a_sweep_refuses_secrets_that_hydra_would_write(
    section: dict[str, Any], planted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "defaults: [pretrain_gpt, _self_]\n" + yaml.safe_dump({"hydra": section})
    (planted / "mine.yaml").write_text(text)
    words = ["-cd", ".", "-cn", "mine", "-m", "model.seed=1,2"]
    assert run_app(words, lambda cfg, info: 0) == 2
    shown = capsys.readouterr()
    assert leaves_nothing(planted, shown.out + shown.err) and "other_planted" not in shown.err


@pytest.mark.parametrize(
    "item",
    ["x: ${oc.env:HF_TOKEN}", f"x: {PLANTED}", f"x/{PLANTED}", f"optional x: {PLANTED}s",
     f"optional hydra/{PLANTED}: x"],
)  # fmt: skip
@pytest.mark.parametrize("more", [[], ["-m", "model.seed=1,2"], ["--cfg", "job"]])
def test_no_file_is_chosen_by_a_secret(
    item: str, more: list[str], planted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name of a file is the origin of its settings, which are recorded."""
    conf = planted / "conf"
    (conf / "x").mkdir(parents=True)
    (conf / f"x/{PLANTED}.yaml").write_text("# @package _global_\nmodel: {seed: 7}\n")
    (conf / "mine.yaml").write_text(f"defaults:\n- pretrain_gpt\n- {item}\n- _self_\n")
    (planted / "work").mkdir()
    os.chdir(planted / "work")
    assert run_app(["-cd", str(conf), "-cn", "mine", *more], lambda cfg, info: 0) == 2
    shown = capsys.readouterr()
    assert "is a secret" in shown.err and leaves_nothing(planted / "work", shown.out + shown.err)


def test_a_folder_whose_name_holds_a_secret_is_refused(
    planted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (planted / f"a{PLANTED}").mkdir()
    monkeypatch.chdir(planted / f"a{PLANTED}")
    assert run_app([], lambda cfg, info: 0) == 2
    assert PLANTED not in capsys.readouterr().err


def test_only_the_secret_is_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "--config-name=../../etc/passwd: there is no such YAML in /run/secrets: none"
    assert hide(text) == text
    monkeypatch.setenv("PASSWORD_FILE", str(tmp_path))  # says where a secret is, and is none
    monkeypatch.setenv("MY_TOKEN", "/etc")
    assert hide_values(f"{tmp_path} and /etc/passwd") == f"{tmp_path} and /etc/passwd"
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    assert hide_values(f"x {PLANTED}y, nats per token: 3.2") == "x ***y, nats per token: 3.2"
    value = {"env": {"HF_TOKEN": "abc", "PATH": "/bin", "DB_PASSWORD": None}, "n": 3}
    assert redacted(value) == {
        "env": {"HF_TOKEN": "***", "PATH": "/bin", "DB_PASSWORD": None},
        "n": 3,
    }


def test_settings_read_the_environment_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was read for each of some 200 keys, which took a third of the time to load settings."""
    looked = Counter[str]()
    may_be_named = secrets._may_be_named

    def count(name: str) -> bool:
        looked[name] += 1
        return may_be_named(name)

    monkeypatch.setattr(secrets, "_may_be_named", count)
    load_module.load(["model.fp8=True"])
    assert 1 <= looked["PATH"] <= 10


def test_values_of_the_default_job_are_no_secrets_unless_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are not looked at one by one, as long as none has the value of a secret variable."""
    assert redacted(default_values(), secrets={}) == default_values()
    monkeypatch.setenv("HF_TOKEN", "CosineAnnealing")
    problem = the_problem()
    assert problem.key == "model.optim.sched.name" and "HF_TOKEN" in problem.reason


@pytest.mark.parametrize(
    "letters",
    [
        "@",
        "+a",
        "~_",
        "token=",
        "://a:",
        "a_",
        "token=[",
        "api_key: ' ",
        "--a ",
        "?a=",
        "://a@",
        "API api ",
    ],
)
def test_a_long_text_is_searched_in_one_pass(letters: str) -> None:
    """A value of a stranger's file is in an error's message, and must not keep it for hours."""
    text = letters * (100_000 // len(letters))
    with limited():
        assert len(hide(text)) <= len(text)
    assert hide("@" * 99 + "api_key=planted-0123") == "@" * 99 + "api_key=***"
