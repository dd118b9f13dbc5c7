"""What `megafp8 migrate` and `megafp8 audit` write and say of a user's files and options."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import import_module, metadata
from pathlib import Path

import pytest

from megafp8.cli.commands import APART, main
from megafp8.config import api
from tests.cli.test_commands import imported_by, run
from tests.cli.test_outside_text import KEY, TOKEN, is_safe
from tests.cli.test_sweep_folders import KINDS, tree_of
from tests.foreign.fuzz import limited
from tests.test_layers import ROOT, imported_names

# ---- secrets and escape sequences


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)


NEMO = f"""
name: "a{TOKEN}"
trainer: {{precision: bf16, logger: "\\e]0;owned", strategy: "{"x" * 9000}"}}
exp_manager:
  exp_dir: /runs/{TOKEN}
  create_wandb_logger: true
  wandb_logger_kwargs: {{project: p, api_key: {KEY}, name: "https://me:{KEY}@host/"}}
env_vars: {{WANDB_API_KEY: {KEY}}}
model:
  hidden_size: 64
  data: {{data_prefix: [1, /data/{TOKEN}/x]}}
  tokenizer: {{library: huggingface, type: "https://me:{KEY}@host/t"}}
  api_key: [{KEY}]
"""


def test_a_migrated_file_has_no_secret(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine\n#.yaml"
    file.write_text(NEMO)
    assert main(["migrate", str(file), "-o", str(tmp_path / "new.yaml")]) == 2
    out, err = capfd.readouterr()
    assert is_safe(out) and is_safe(err), out + err
    text = (tmp_path / "new.yaml").read_text()
    assert TOKEN not in text and KEY not in text, text
    assert "contains a secret" in text and "hidden_size: 64" in text


OF_MEGATRON = f"""
export DB_PASS={KEY}
python pretrain_gpt.py --num-layers 2 --train-iters 10 --lr 1e-3 --wandb-api-key {KEY} \\
    --openai-key={KEY} --wandb-exp-name name-$DB_PASS --data-path "https://h/x?token={KEY}"
"""
OF_BRIDGE = f"""
model: {{num_layers: 2}}
train: {{train_iters: 20}}
logger: {{wandb-api-key: {KEY}, wandb_exp_name: {KEY}, wandb_project: "https://{KEY}@host/x"}}
env: {{GITHUB_PAT: {KEY}, hfToken: [{KEY}]}}
"""


@pytest.mark.parametrize(("name", "text"), [("x.sh", OF_MEGATRON), ("x.yaml", OF_BRIDGE)])
def test_a_migrated_script_or_file_of_bridge_has_no_secret(
    name: str, text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if name == "x.sh":
        pytest.importorskip("tree_sitter_bash", reason="needs tree-sitter-bash")
    (tmp_path / name).write_text(text)
    assert main(["migrate", str(tmp_path / name), "-o", str(tmp_path / "new.yaml")]) == 2
    out, err = capfd.readouterr()
    new = (tmp_path / "new.yaml").read_text()
    assert "written" in out and is_safe(out) and not err, out + err
    assert KEY not in new and "***" in new and "num_layers: 2" in new, new


# ---- files that are there already


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "options"), [("out/x", ("-o", "out/x")), ("nemo.megafp8.yaml", ())]
)
def test_no_file_is_overwritten(
    name: str,
    options: Sequence[str],
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nemo.yaml").write_text("trainer: {precision: bf16}\nmodel: {hidden_size: 64}\n")
    Path("elsewhere").write_text("{}")
    Path(name).parent.mkdir(exist_ok=True)
    KINDS[kind](Path(name))
    before = tree_of(tmp_path)
    with limited():
        assert main(["migrate", "nemo.yaml", *options]) == 2
    shown = capsys.readouterr()
    assert Path(name).name in shown.err and "Traceback" not in shown.err, shown
    assert tree_of(tmp_path) == before


# ---- the commands


@pytest.mark.parametrize("name", ["migrate", "audit"])
def test_the_commands_are_found_without_any_metadata(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy of the repository on PYTHONPATH is enough, before anything is installed."""
    monkeypatch.setattr(metadata, "entry_points", lambda **_: metadata.EntryPoints())
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: megafp8 {name} ")
    assert "torch" not in imported_by(name, "--help")


def test_the_old_name_of_migrate_runs_it(tmp_path: Path) -> None:
    done = run(str(tmp_path / "nowhere.yaml"), module="megafp8.cli.migrate")
    assert done.returncode == 2 and "is `megafp8 migrate` now" in done.stderr
    assert "error: " in done.stderr and "cannot be read" in done.stderr


def test_a_package_of_ours_that_audit_misses_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_without(argv: object) -> None:
        raise ModuleNotFoundError("No module named 'te_cpu'", name="te_cpu.loading")

    monkeypatch.setattr(import_module(APART["audit"].module), "main", run_without)
    assert main(["audit"]) == 2
    assert "megafp8 audit needs the package te_cpu. In" in capsys.readouterr().err


MAY_BE_IMPORTED = {
    *("megafp8", "megafp8.config.api", "megafp8.cli.job"),
    *("megafp8.errors", "megafp8.foreign", "megafp8.secrets"),
    *("megafp8.specs.data", "megafp8.specs.recipes", "megafp8.specs.te_versions"),
    *("megafp8.specs", "megafp8.specs.parameters"),  # these and the next for weights
    *("megafp8.checkpoint.huggingface_files", "megafp8.train.huggingface"),
}
"""What the package uses of the trainer."""
FOLDERS = ("megafp8_migrate", "megafp8_migrate/audit")
OURS = ("megafp8", "te_cpu", "fp8_numerics")


def imports_of(file: Path) -> Iterator[str]:
    """Yield the modules of our packages that a file imports, but those of the two themselves."""
    *above, stem = file.relative_to(ROOT).with_suffix("").parts
    is_package = stem == "__init__"
    module = (*above,) if is_package else (*above, stem)
    for name in imported_names(file.read_text(), module, is_package):
        path = ROOT / name.replace(".", "/")
        is_module = path.is_dir() or path.with_suffix(".py").exists()
        found = name if is_module else name.rpartition(".")[0]
        within = any(f"{found}.".startswith(f"{own.replace('/', '.')}.") for own in FOLDERS)
        if found.partition(".")[0] in OURS and not within:
            yield found


def test_the_trainer_is_used_through_few_modules() -> None:
    files = {path for name in FOLDERS for path in (ROOT / name).rglob("*.py")}
    found = {module: file for file in files for module in imports_of(file)}
    of_te = {module for module in found if "te_cpu" in module or "fp8_numerics" in module}
    assert found.keys() - of_te == MAY_BE_IMPORTED
    assert of_te and {found[module].parent.name for module in of_te} == {"audit"}


def test_the_interface_of_the_configuration_has_what_is_used_alone() -> None:
    """Every name of it stands in a file of migrate or audit, and each is that of its module."""
    texts = [path.read_text() for name in FOLDERS for path in (ROOT / name).rglob("*.py")]
    unused = [
        name for name in api.__all__ if not any(re.search(rf"\b{name}\b", text) for text in texts)
    ]
    assert unused == []


# ---- options


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nemo.yaml").write_text("model: {num_layers: 2}\n")
    (tmp_path / "number.yaml").write_text("defaults: 5\nmodel: {num_layers: 2}\n")
    (tmp_path / "accelerate.yaml").write_text(
        "mixed_precision: fp8\nfp8_config: {backend: TE, margin: 1}\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("migrate", "nemo.yaml", "more"), "argument=more: has no effect"),
        (("migrate", "nemo.yaml", "--env", "TP=2"), "--env=TP=2: has no effect"),
        (("audit", "accelerate.yaml", "more"), "argument=more: has no effect"),
    ],
)
def test_a_yaml_has_no_arguments(
    words: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(words)) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and said in shown
    assert not list(Path().glob("*.megafp8.yaml"))


def test_defaults_of_a_yaml_that_are_no_list(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", "number.yaml", "-o", "new.yaml"]) == 2
    assert "defaults" in capsys.readouterr().out
