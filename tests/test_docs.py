"""Check that what the documentation names exists: links, files, tests, modules, commands, settings.

Read are all pages below docs, and those at the top. `PAGES` are their texts; each check
yields a complaint for every name that is not there.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from megafp8.cli.commands import APART, COMMANDS
from megafp8.config.layers import conf_dir
from megafp8.config.load import load
from megafp8.config.nemo import nemo_keys, nemo_sections
from megafp8.config.overrides import PRESET_GROUPS, preset_names
from megafp8.config.schema import all_keys, all_sections
from megafp8.errors import UserError
from scripts.packages import BESIDE, MAIN, ROOT, packages, projects
from tests.test_layers import FLOORS

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for path in (
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "README.md",
        *(path for name in packages()[1:] for path in sorted((ROOT / name).rglob("README.md"))),
        *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY", "AGENTS")),
    )
}
FOLDERS = (*packages(), *BESIDE, "docs", "conf")
FILE = re.compile(r"[\w./*-]+\.(?:py|md|sh|yaml|toml|c|json|sbatch|yml|ini|cfg)")
LEFT_BY_RUNS = re.compile(
    r"(?:.*/)?(?:config\.yaml|(?:summary|run|sweep|job|restarts|manifest|dataset|config"
    r"|tokenizer\w*|special_tokens_map|tokenizer\.tiktoken|profile_rank\S*|.*\.dataset"
    r"|.*\.tokenizer)\.json|mine/.*|hf/.*|model\.yaml|vocab\.json|multirun\.yaml"
    r"|megatron_gpt_config\.yaml|delayed_scaling\.cu)"
)
"""Files of runs, of data, or of other projects."""
NOT_OURS = frozenset(
    {
        "megafp8/te",  # a folder in a cache
        "tests/fp8/traces/NAME",
        "megafp8.recipes",  # a group of entry points
        "megafp8.sqsh",
        "megafp8.sif",
        "train.sh",  # in docs/guide/migrate.md, a script of Megatron's
        "train.py",  # in fp8_coverage's page, a program of the reader's
        "IMPLEMENTATION.py",  # in the page of the conformance vectors, a reader's casts
        "model.layers.0",  # in docs/guide/own_model.md, of any PyTorch model
        "model.parameters",
        "model.state_dict",
    }
)
"""Names that look like a file, a module or a setting of this repository."""
OPTION = re.compile(r"(?<=\s)--[a-z][a-z0-9-]*")
Check = Callable[[str, str], Iterator[str]]


@cache
def _tests() -> frozenset[str]:
    sources = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")]
    return frozenset(name for text in sources for name in re.findall(r"def (test_\w+)", text))


@cache
def _file_names() -> frozenset[str]:
    folders = (ROOT / name for name in FOLDERS)
    return frozenset(path.name for folder in folders for path in folder.rglob("*"))


def code_of(text: str) -> list[str]:
    """Return inline code, and the lines of code blocks with continued lines put on one."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    inline = re.findall(
        r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    return [" ".join(part.split()) for part in (*inline, *lines)]


def anchors_of(text: str) -> set[str]:
    """Return the anchors of a page: those that GitHub gives its headings, and explicit ones."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


def bad_links(page: str, text: str) -> Iterator[str]:
    """Yield links to files, or to anchors in pages, that do not exist."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, fragment = target.partition("#")
        if path.startswith(("http://", "https://", "mailto:")):
            continue
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists():
            yield f"link to {target}"
        elif fragment and fragment not in anchors_of(file.read_text("utf-8")):
            yield f"link to {target}: no such anchor"


def bad_definitions(page: str, text: str) -> Iterator[str]:
    """Yield names of which a page says that they are in a file, and which that file lacks.

    Such names are written `name` in [file](path), or **`name`** ([file](path)).
    """
    said = re.findall(r"`([A-Za-z_][\w.]*)`(?:\s(?:in|of))\s\[[^\]]+\]\(([^)#\s]+)\)", text)
    said += re.findall(r"\*\*`([A-Za-z_]\w*)`\*\*\s\(\[[^\]]+\]\(([^)#\s]+)\)", text)
    for name, path in said:
        file = (ROOT / page).parent / path
        source = file.read_text("utf-8") if file.is_file() else ""
        if not all(re.search(rf"\b{part}\b", source) for part in name.split(".")):
            yield f"{name} in {path}"


def bad_paths(page: str, text: str) -> Iterator[str]:
    """Yield files and folders of the repository that do not exist."""
    for code in code_of(text):
        for word in re.findall(r"[\w./*-]+", code):
            word = word.strip(".,").removesuffix("/")
            is_file = FILE.fullmatch(word) is not None
            if word in NOT_OURS or LEFT_BY_RUNS.fullmatch(word):
                continue
            if word.startswith(("runs/", "data/", "my/", "/", "-")):
                continue
            if word.split("/")[0] in FOLDERS and "/" in word:
                if not list(ROOT.glob(word)):
                    yield f"path {word}"
            elif is_file and "/" in word and not re.search(r"\.jsonl?$", word):
                if not any(list(folder.glob(word)) for folder in (ROOT, ROOT / "megafp8")):
                    yield f"path {word}"
            elif is_file and word.endswith((".py", ".sh", ".sbatch")) and "*" not in word:
                if word not in _file_names() and not (ROOT / word).exists():
                    yield f"file {word}"


def bad_tests(page: str, text: str) -> Iterator[str]:
    """Yield names of test functions that do not exist."""
    for code in code_of(text):
        if re.fullmatch(r"test_\w+", code) and code not in _tests():
            yield f"test {code}"


def bad_modules(page: str, text: str) -> Iterator[str]:
    """Yield modules that do not exist, and options that the module or script does not have."""
    if page.startswith("docs/releases/"):  # they name what is gone
        return
    for code in code_of(text):
        for name in re.findall(
            rf"(?<![\w./-])(?:{'|'.join(packages())}|tests|scripts)(?:\.\w+)+", code
        ):
            if name not in NOT_OURS and not FILE.fullmatch(name) and _source_of(name) is None:
                yield f"module {name}"
        command = re.match(
            r"(?:\$ )?(?:\.venv/bin/)?"
            r"(?:python (?:-m ([\w.]+)|(\S+\.py))|megafp8 ([a-z][a-z-]*))(.*)",
            code,
        )
        if command is None:
            continue
        modules = {name: f"megafp8.cli.{entry.module}" for name, entry in COMMANDS.items()}
        modules |= {name: entry.module for name, entry in APART.items()}
        if command[3] and command[3] not in modules:
            yield f"command megafp8 {command[3]}"
            continue
        name = modules[command[3]] if command[3] else command[1]
        file = _source_of(name) if name else ROOT / command[2]
        if file is None or not file.is_file() or name in ("pytest", "pip"):
            continue
        options = [ROOT / "megafp8/cli/job.py"]  # what every command with settings takes
        if "add_quantized_options(" in file.read_text("utf-8"):
            options.append(ROOT / "megafp8/cli/export_quantized.py")
        package = [*file.parent.glob("*.py")] if file.name == "__main__.py" else []
        known = "".join(part.read_text("utf-8") for part in (file, *options, *package))
        for option in OPTION.findall(re.sub("'[^']*'", "", command[4]).partition(" # ")[0]):
            if f'"{option}"' not in known:
                yield f"option {option} of {name or command[2]}"


def _source_of(name: str) -> Path | None:
    """Return the file of a module, also where attributes of it follow; None if there is none."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        stem = ROOT.joinpath(*parts[:end])
        files = (stem.with_suffix(".py"), stem / "__main__.py", stem / "__init__.py")
        found = [file for file in files if file.is_file()]
        if found and (end == len(parts) or parts[end] in "".join(f.read_text() for f in found)):
            return found[0]
    return None


def bad_targets(page: str, text: str) -> Iterator[str]:
    """Yield targets of make that do not exist."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for code in code_of(text):
        command = re.match(r"(?:\$ )?make ([a-z][a-z-]*)", code)
        if command and not re.search(rf"^{command[1]}:", makefile, re.MULTILINE):
            yield f"make {command[1]}"


def bad_settings(page: str, text: str) -> Iterator[str]:
    """Yield keys and presets that do not exist."""
    known = all_keys().keys() | all_sections() | nemo_keys().keys() | nemo_sections() | NOT_OURS
    for code in code_of(text):
        for name in re.findall(r"(?<![\w./{-])(?:trainer|exp_manager|model)\.[\w.*]+", code):
            name = name.rstrip(".")
            if "*" not in name and name not in known and not FILE.fullmatch(name):
                yield f"setting {name}"
        for group in PRESET_GROUPS:
            for name in re.findall(rf"(?<![\w.]){group}=([\w.]+)", code):
                if name not in ("NAME", *preset_names(group, [conf_dir()])):
                    yield f"preset {group}={name}"


@cache
def _sources() -> str:
    folders = (ROOT / name for name in FOLDERS if name not in ("docs", "tests"))
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    kinds = (".py", ".sh", ".sbatch")
    return "".join(path.read_text("utf-8") for path in files if path.suffix in kinds)


def bad_names(page: str, text: str) -> Iterator[str]:
    """Yield variables of the environment and extras of the package that do not exist."""
    known = {name: project.get("optional-dependencies", ()) for name, project in projects().items()}
    for code in code_of(text):
        for name in re.findall(r"MEGAFP8_\w+", code):
            if name not in _sources():
                yield f"variable {name}"
        for package, extra in re.findall(r"\.(?:/(\w+))?\[([\w-]+)\]", code):
            if extra not in known[package or MAIN]:
                yield f"extra {extra}"


def bad_commands(page: str, text: str) -> Iterator[str]:
    """Yield runs and dry runs with settings that are refused.

    Left out are sweeps, and commands with parts that only stand for something.
    """
    for code in code_of(text):
        command = re.search(r"(?:pretrain_gpt\.py|megafp8 (?:pretrain|dryrun)) (.*)", code)
        if (
            command is None
            or re.search(r"…|[$<]|SETTINGS_OF|KEY=|--(?:config|help)|-m ", command[1])
            or " --line " in code
        ):  # a command of Megatron's
            continue
        words = shlex.split(command[1].partition(" # ")[0], comments=True)
        words = [word for word in words if re.match(r"[\w.]+=", word)]
        try:
            load(words)
        except UserError as error:
            yield f"{' '.join(words)}: {error}"


CHECKS: list[Check] = [
    bad_links, bad_definitions, bad_paths, bad_tests, bad_modules, bad_targets, bad_settings,
    bad_names, bad_commands,
]  # fmt: skip

NAMES_OF_OTHERS: dict[str, tuple[Check, ...]] = {
    "docs/evidence/te_own_tests.md": (bad_paths, bad_tests),  # Transformer Engine's
}


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page: str) -> None:
    text = PAGES[page]
    checks = [check for check in CHECKS if check not in NAMES_OF_OTHERS.get(page, ())]
    found = [f"{page}: {complaint}" for check in checks for complaint in check(page, text)]
    assert not found, "\n".join(found)


def modules_of(folder: Path) -> set[str]:
    """Return the names of all modules in a package and in its subpackages."""
    kinds = (".py", ".c")
    files = (p for p in folder.rglob("*") if p.suffix in kinds and not p.is_symlink())
    names = {path.stem if path.suffix == ".py" else path.name for path in files}
    return names - {"__init__", "__main__"}


@pytest.mark.parametrize("package", [*FLOORS, *(f"{name}/" for name in packages()[1:])])
def test_the_architecture_page_lists_each_packages_modules(package: str) -> None:
    page = PAGES["docs/reference/architecture.md"]
    item = re.search(
        rf"^- ?(\d*) \*\*`{package}`\*\*(.*?)(?=^- |^$)", page, re.DOTALL | re.MULTILINE
    )
    assert item is not None, f"no item about {package}"
    listed = set(re.findall(r"[\w.]+(?!\w*/)", item[2].partition("*Modules:*")[2]))
    listed -= {name for name in re.findall(r"(\w+)/", item[2])}
    there = modules_of(ROOT / package if package.endswith("/") else ROOT / MAIN / package)
    floor = FLOORS.get(package, "")
    assert item[1] == str(floor), f"{package} is on floor {floor}"
    missing, gone = sorted(there - listed), sorted(listed - there)
    assert not missing, (
        f"add {missing} to the item about {package} in docs/reference/architecture.md"
    )
    assert not gone, (
        f"remove {gone} from the item about {package} in docs/reference/architecture.md"
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[a](nowhere.md)", "link to nowhere.md"),
        ("[a](training.md#nowhere)", "link to training.md#nowhere: no such anchor"),
        ("`nowhere` in [a](../../megafp8/errors.py)", "nowhere in ../../megafp8/errors.py"),
        ("**`Nowhere`** ([a](../../megafp8/errors.py))", "Nowhere in ../../megafp8/errors.py"),
        ("`tests/nowhere`", "path tests/nowhere"),
        ("`fp8/nowhere.py`", "path fp8/nowhere.py"),
        ("`test_nowhere.py`", "file test_nowhere.py"),
        ("`test_that_is_nowhere`", "test test_that_is_nowhere"),
        ("`megafp8.nowhere`", "module megafp8.nowhere"),
        ("`python -m megafp8.nowhere`", "module megafp8.nowhere"),
        ("`megafp8 dryrun --nowhere`", "option --nowhere of megafp8.cli.dryrun"),
        ("`megafp8 nowhere`", "command megafp8 nowhere"),
        ("`python benchmarks/gpu_gemm.py --a`", "option --a of benchmarks/gpu_gemm.py"),
        ("```console\n$ make nowhere\n```", "make nowhere"),
        ("`model.fp9=True`", "setting model.fp9"),
        ("`model=gpt9`", "preset model=gpt9"),
        ("`python pretrain_gpt.py model.hidden_size=101`", "model.hidden_size=101: "),
        ("`MEGAFP8_NOWHERE`", "variable MEGAFP8_NOWHERE"),
        ("`pip install '.[nowhere]'`", "extra nowhere"),
        ("`pip install './te_cpu[nowhere]'`", "extra nowhere"),
        ("`te_cpu.nowhere`", "module te_cpu.nowhere"),
    ],
)
def test_what_does_not_exist_is_found(text: str, complaint: str) -> None:
    (found,) = [found for check in CHECKS for found in check("docs/guide/page.md", text)]
    assert found.startswith(complaint)


@pytest.mark.parametrize(
    "text",
    [
        "[a](training.md#continuing), [b](../../README.md), [c](https://example.org)",
        "`UserError` in [errors.py](../../megafp8/errors.py)",
        "`megafp8/fp8/kernels/triton_*.py`, `fp8_numerics/gemm.py`, `test_docs.py`",
        "`from megafp8 import fp8`, `megafp8.errors`, `megafp8 dryrun --rank N`",
        "`make check`, `model.optim.lr=1e-3`, `model=gpt3_125m`, `trainer.logger`",
    ],
)
def test_what_exists_is_accepted(text: str) -> None:
    assert not [found for check in CHECKS for found in check("docs/guide/page.md", text)]


def test_the_architecture_page_begins_with_the_packages_and_is_short() -> None:
    lines = PAGES["docs/reference/architecture.md"].splitlines()
    assert len(lines) < 250
    beginning = "\n".join(lines[:30])
    assert all(f"\n- **`{name}/`**: " in beginning for name in packages())
