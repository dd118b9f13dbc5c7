"""The distributions of this repository are installed together, and every check covers them all."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import yaml

from scripts.packages import AT_THE_TOP, BESIDE, ROOT, packages, projects, sources
from tests.test_english import checked_files
from tests.test_layers import MAY_IMPORT, imported_names, source_files

PIP = """
import subprocess, sys
done = subprocess.run([sys.executable, "setup.py", "egg_info"], cwd=sys.argv[1])
sys.exit(done.returncode)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Python without packages, for which setuptools would only say what it builds."""
    place = tmp_path_factory.mktemp("python")
    venv.create(place, with_pip=False, symlinks=True)
    (site,) = place.glob("lib/python*/site-packages")
    fake = "class Distribution: pass\ndef setup(**words): print('building')\n"
    (site / "setuptools.py").write_text(fake)
    (place / "pip.py").write_text(PIP)
    return place / "bin" / "python"


def install(python: Path, folder: str, words: str) -> str:
    """Let a process with the words of pip build a folder; return what it prints."""
    command = [str(python), str(python.parents[1] / "pip.py"), str(ROOT / folder), *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert bool(done.returncode) != (done.stdout == "building\n"), done.stderr
    return done.stdout + done.stderr


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("folder", "words", "line"),
    [
        (".", "install .", "pip install ./fp8_numerics ./fp8_coverage ."),
        (".", "install -q -e .[te-cpu,data]",
         "pip install -q -e ./fp8_numerics -e ./fp8_coverage -e ./te_cpu -e '.[te-cpu,data]'"),
        (".", "wheel .", "pip wheel ./fp8_numerics ./fp8_coverage ."),
        (".", f"install {ROOT}", f"pip install ./fp8_numerics ./fp8_coverage {ROOT}"),
        (".", "install ./te_cpu .", "pip install ./te_cpu ./fp8_numerics ./fp8_coverage ."),
        ("te_cpu", "install ./te_cpu", "pip install ./fp8_numerics ./te_cpu"),
        ("megafp8_migrate", "install -e ./megafp8_migrate",
         "pip install -e ./fp8_numerics -e ./fp8_coverage -e . -e ./te_cpu -e ./megafp8_migrate"),
    ],
)  # fmt: skip
def test_an_install_without_what_it_needs_ends_with_the_line_that_works(
    python: Path, folder: str, words: str, line: str
) -> None:
    """A name that no index has must not be asked for: pip would find nothing, or a stranger's."""
    said = install(python, folder, words)
    version = (ROOT / "VERSION").read_text("utf-8").strip()
    assert f"{version} of the same repository, which no package index has. Install all" in said
    assert said.splitlines()[-1] == f"    {line}"
    assert install(python, folder, line.replace("pip ", "").replace("'", "")) == "building\n"


@pytest.mark.parametrize(
    "words",
    [
        "install --no-deps .",
        *(f"install {option} given ." for option in ("-r", "-f", "-i", "--requirement")),
        *(
            f"install --{option} given ."
            for option in ("find-links", "index-url=", "extra-index-url")
        ),
        "check .",
    ],
)
def test_an_install_that_may_find_them_elsewhere_is_not_refused(python: Path, words: str) -> None:
    assert install(python, ".", words) == "building\n"


@pytest.mark.parametrize("is_same", [True, False])
def test_what_is_installed_in_this_version_is_not_asked_for_again(
    python: Path, is_same: bool
) -> None:
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    version = (ROOT / "VERSION").read_text("utf-8").strip() if is_same else "0.1"
    records = []
    for name in ("fp8-numerics", "fp8-coverage"):
        records.append(site / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA")
        records[-1].parent.mkdir()
        records[-1].write_text(f"Name: {name}\nVersion: {version}\n")
    try:
        said = install(python, ".", "install -e .")
        line = "pip install -e ./fp8_numerics -e ./fp8_coverage -e .\n"
        assert said.endswith("building\n" if is_same else line)
    finally:
        for record in records:
            shutil.rmtree(record.parent)


def test_a_copy_takes_every_package_from_itself(tmp_path: Path) -> None:
    """A folder on PYTHONPATH, and that of a script, come before what is installed."""
    for name in packages():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    names = ", ".join(map(repr, packages()))
    code = f"from importlib.util import find_spec\nfor n in ({names}): print(find_spec(n).origin)"
    (tmp_path / "pretrain_gpt.py").write_text(code)
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for words, environment in (
        (["-c", code], without | {"PYTHONPATH": str(tmp_path)}),
        ([str(tmp_path / "pretrain_gpt.py")], without),
    ):
        done = subprocess.run(
            [sys.executable, *words], cwd="/", env=environment, capture_output=True, text=True
        )
        origins = [Path(line).parent for line in done.stdout.splitlines()]
        assert origins == [tmp_path / name for name in packages()], done.stderr


def test_all_distributions_have_one_version_and_one_licence() -> None:
    """Each reads the file VERSION of the repository, by a link in its folder."""
    for name, project in projects().items():
        folder = ROOT / name
        assert project["dynamic"] == ["version"] and "version" not in project
        assert project["license"] == "Apache-2.0"
        for link in ("VERSION", "setup.py", "LICENSE")[: 1 if name == "megafp8" else 3]:
            assert (folder / link).resolve() == ROOT / link and (folder / link).is_symlink(), link
    shown = subprocess.run(
        [sys.executable, "-m", "megafp8", "--version"], cwd=ROOT, capture_output=True, text=True
    )
    assert shown.stdout.split()[1] == (ROOT / "VERSION").read_text().strip()


NAMED_OTHERWISE = {"yaml": "pyyaml", "hydra": "hydra-core", "antlr4": "hydra-core"}
"""Distributions by the modules that they have under another name."""
WHERE_INSTALLED = {"pytest", "torchao", "transformer_engine", "transformers", "triton"}
"""What some modules need, which nothing imports where it is not installed."""


@pytest.mark.parametrize("package", packages())
def test_a_distribution_needs_what_its_modules_import_first(package: str) -> None:
    imported = {
        name.partition(".")[0]
        for path in sources(ROOT, package)
        for statement in ast.parse(path.read_text("utf-8")).body
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for name in imported_names(ast.unparse(statement), (), is_package=False)
    }
    imported -= {package, "__future__", *WHERE_INSTALLED, *sys.stdlib_module_names}
    imported -= {"te_cpu"} if package == "megafp8" else set()  # the extra te-cpu, in backends/te
    ours = {name: project["name"] for name, project in projects().items()}
    wanted = {(NAMED_OTHERWISE | ours).get(name, name.replace("_", "-")) for name in imported}
    given = {
        re.split(r"[^\w-]", line)[0]
        for name in (package, *MAY_IMPORT[package])
        if name == package or ours[name] in projects()[package]["dependencies"]
        for line in projects()[name]["dependencies"]
    }
    assert wanted <= given, f"not in {package}'s dependencies: {wanted - given}"


def test_a_change_is_one_short_line() -> None:
    """The history of the repository is the diary; a reader of the changes skims them."""
    lines = (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines()
    assert not [line for line in lines if len(line) > 100]
    entries = lines[lines.index("## 0.3.0") - 1 :]
    assert not [line for line in entries if line and not line.startswith(("- ", "## "))]
    versions = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    assert versions[0] in ("Unreleased", (ROOT / "VERSION").read_text("utf-8").strip())


def test_a_release_has_notes_of_a_page_and_a_citation() -> None:
    version = (ROOT / "VERSION").read_text("utf-8").strip()
    notes = (ROOT / f"docs/releases/{version}.md").read_text("utf-8")
    assert notes.startswith(f"# megafp8 {version}\n") and len(notes.splitlines()) < 70
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert cited["version"] == version
    assert cited["authors"] == [{"name": "The megafp8 contributors"}]


WORKFLOWS = sorted([*ROOT.glob(".github/workflows/*.yml"), *ROOT.glob("examples/*/*.yml")])
CHECKED = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": sorted(ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")),
    "citation-file-format": [ROOT / "CITATION.cff"],
}


@pytest.mark.parametrize("schema", CHECKED)
def test_files_for_the_host_fit_their_schemas(schema: str) -> None:
    files = [str(path) for path in CHECKED[schema]]
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*words, *files], capture_output=True, text=True)
    assert files and done.returncode == 0, done.stdout


def test_workflows_take_actions_by_commit_and_no_secrets() -> None:
    """A tag of an action can be moved; publishing needs no password but the job's own identity."""
    for path in WORKFLOWS:
        text = path.read_text("utf-8")
        for action in re.findall(r"uses: (.*)", text):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action), (path.name, action)
        assert "secrets." not in text
        workflow = yaml.safe_load(text)
        assert workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            may_write = job.get("permissions", {}).keys() - {"contents"}
            runs_code = [step for step in job["steps"] if "run" in step or "checkout" in str(step)]
            assert not (may_write and runs_code), "a job that may write runs no code of the tree"


def test_the_image_gets_what_determines_the_dependencies() -> None:
    """The layer of dependencies copies each pyproject.toml, and makes the links beside them."""
    layer = (ROOT / "Dockerfile").read_text("utf-8").partition("COPY . .")[0]
    for name in packages()[1:]:
        assert f"COPY {name}/pyproject.toml {name}/\n" in layer
    assert "COPY VERSION setup.py pyproject.toml ./\n" in layer


def test_settings_of_the_tools_name_all_packages() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    assert tuple(tool["mypy"]["files"]) == tuple(sorted(packages()))
    assert f"!{{{','.join(sorted(packages()))}}}/**" in tool["ruff"]["lint"]["per-file-ignores"]


def test_every_python_file_is_in_a_package_or_a_listed_folder() -> None:
    """What is in no list, no check would read."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this copy of the tree has no repository that lists its files")
    paths = [Path(name) for name in listed.stdout.split("\0") if name]
    links = {Path(name) / "setup.py" for name in packages()[1:]}
    known = (*packages(), *BESIDE)
    stray = [p for p in paths if (p.parts[0] if len(p.parts) > 1 else "") not in known]
    assert sorted(map(str, stray)) == list(AT_THE_TOP)
    assert links <= {*paths}
    ours = {p for p in paths if p.parts[0] in packages()} - links
    assert {path.relative_to(ROOT) for path in sources(ROOT)} == ours


def test_each_check_reads_each_package() -> None:
    english = {path for path, _ in checked_files()}
    floors = {path.relative_to(ROOT).as_posix() for path in source_files()}
    for path in sources(ROOT):
        assert path.relative_to(ROOT).as_posix() in english & floors
