"""Every command in the guide and the README is run, in the order of its page, or says why not.

The commands are those after `$ ` in console blocks. A page's commands run in one folder, since
later ones use what earlier ones left. `added` makes them small; everything else is what the page
shows. What it shows below a command that nothing was added to is what the command prints.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from megafp8.data.builtin import PREFIX, build_dataset
from scripts.packages import packages
from tests.data.helpers import tiny_corpus, tiny_documents
from tests.megafp8_migrate.test_megatron import RUN_CONFIG, SCRIPT
from tests.megafp8_migrate.test_migrate import TE_BLOCK
from tests.te_sources import need_sources
from tests.test_docs import _tests
from tests.test_layers import ROOT

STEPS = "trainer.max_steps=2 trainer.limit_val_batches=1 trainer.accelerator=cpu"
MODEL = (
    "model.num_layers=2 model.hidden_size=128 model.num_attention_heads=2 "
    "model.encoder_seq_length=128 model.micro_batch_size=1"
)
DATA = f"model.data.data_prefix=small/{PREFIX}"
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
SMALL = f"{STEPS} {MODEL} {DATA}"
FIRST = f"python pretrain_gpt.py {SMALL} exp_manager.name=first"
TEXT = "".join(
    json.dumps({"text": f"def f{i}(x):\n    return x + {i}  # the sum\n" * 9}) + "\n"
    for i in range(99)
)
QUESTIONS = "".join(
    json.dumps({"input": f"What is {i} + 1?", "output": f"It is {i + 1}."}) + "\n"
    for i in range(60)
)
TALKS = "".join(
    json.dumps({"messages": [{"role": role, "content": f"{i}"} for role in ("user", "assistant")]})
    + "\n"
    for i in range(60)
)
SLURM = "needs Slurm: tests/slurm submits such jobs (make test-slurm)"
IMAGE = "needs root, and makes an image within minutes: make test-container"


@dataclass(frozen=True)
class Page:
    """Say how the commands of a page are run, each by how it begins; the longest beginning counts.

    Attributes:
        before: Commands whose results a reader of the page has.
        files: Files that the reader has.
        links: Names of the reader's folders, and the folders of this repository in their place.
        added: What is added to a command.
        not_run: Why no test of this file runs a command.
        codes: Exit codes other than 0.
        modules: Packages that are not of this project, without which the page is not run.
        te: Versions of Transformer Engine whose Python is needed.
        is_fast: Whether all commands together take seconds.
    """

    before: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    te: tuple[str, ...] = ()
    is_fast: bool = False


PAGES = {
    "README.md": Page(
        before=(f"python pretrain_gpt.py {SMALL}",),
        files={"my_texts/a.jsonl": TEXT},
        added={
            "megafp8 generate": "--tokens 5",
            "python pretrain_gpt.py": SMALL,
            "megafp8 preprocess": "--vocab-size 300",
            "megafp8 pretrain": f"{STEPS} {MODEL}",
        },
        not_run={
            "git clone ADDRESS": "downloads",
            "make pretrain": "makes .venv; the default job is the first command of training.md",
            "source .venv/bin/activate": "needs .venv in the folder of the page",
            "make test": "runs this test",
            "sbatch": SLURM,
        },
    ),
    "docs/guide/containers.md": Page(
        not_run={
            "mkdir -p runs": "needs Docker",
            "srun": SLURM,
            "CONTAINER_IMAGE=": SLURM,
            "docker": "needs Docker",
            "make container": IMAGE,
            "make test-container": IMAGE,
            "scripts/container": IMAGE,
            "enroot": "needs enroot, which no machine of ours has",
            "apptainer": "needs Apptainer, which no machine of ours has",
        },
    ),
    "docs/guide/data.md": Page(
        files={"corpus.jsonl": TEXT, "other.jsonl": TEXT},
        added={
            "megafp8 preprocess corpus.jsonl": "--vocab-size 300",
            "python pretrain_gpt.py": f"{STEPS} {MODEL}",
        },
    ),
    "docs/guide/dryrun.md": Page(),
    "docs/guide/evaluation.md": Page(
        added={
            "megafp8 pretrain": SMALL,
            "python -m lm_eval": "--limit 2",
            "megafp8 serve-diff": "--validation-samples 2",
            "megafp8 export runs/llama": "--validation-samples 2",
        },
        not_run={
            "pip install": "downloads",
            "export HF_HUB_OFFLINE=1": "acts in its own shell: each test has these variables",
        },
        modules=("lm_eval",),
    ),
    "docs/guide/finetuning.md": Page(
        before=(
            FIRST,
            f"megafp8 export runs/first hf && echo '{CHAT}' > hf/chat_template.jinja",
        ),
        files={
            "chats.jsonl": TALKS,
            "mine.jsonl": QUESTIONS,
            "faq.jsonl": QUESTIONS.replace('"input"', '"question"').replace('"output"', '"answer"'),
        },
        added={
            "python finetune_gpt.py": f"{STEPS} model.micro_batch_size=1",
            "megafp8 generate": "--tokens 5",
        },
    ),
    "docs/guide/finetuning_example.md": Page(
        before=(FIRST.replace("=first", "=base").replace("seq_length=128", "seq_length=512"),),
        added={
            "python finetune_gpt.py": f"{STEPS} model.micro_batch_size=1",
            "python examples/08_fine_tune_on_signatures.py score": "--limit 2",
        },
    ),
    "docs/guide/install.md": Page(
        before=(f"python pretrain_gpt.py {SMALL}",),
        added={"megafp8 generate": "--tokens 5"},
        not_run={
            "git clone ADDRESS": "downloads",
            "make pretrain": "makes .venv; the default job is the first command of training.md",
            "source .venv/bin/activate": "needs .venv in the folder of the page",
        },
    ),
    "docs/guide/megatron_weights.md": Page(
        not_run={
            "megafp8 import": "test_a_run_starts_from_the_folder_as_from_its_import",
            "megafp8 pretrain": "test_a_run_starts_from_the_folder_as_from_its_import",
            "python -m torch.distributed.launch": "NeMo's own program, in its container",
            "python /opt/NeMo": "NeMo's own program, in its container",
        },
    ),
    "docs/guide/migrate.md": Page(
        files={
            "train.sh": f"{SCRIPT.replace('GPUS=2', 'GPUS=4')} --fp8-format hybrid "
            "--tensor-model-parallel-size ${TP:-2} --save $1 --tensorboard-dir $2\n",
            "run_config.yaml": yaml.safe_dump(RUN_CONFIG),
            "accelerate.yaml": TE_BLOCK,
        },
        links={"wheels": "tests/megafp8_migrate/megatron_stand_in"},
        not_run={
            "pip download": "downloads; a stand-in for Megatron is in its place",
        },
        codes={"megafp8 migrate --line": 2, "megafp8 migrate run_config.yaml": 2},
        te=("2.12.0", "2.20.2"),
    ),
    "docs/guide/moe.md": Page(
        added={
            "python pretrain_gpt.py": f"{STEPS} {DATA} model.num_layers=2 model.hidden_size=64 "
            "model.ffn_hidden_size=32 model.num_moe_experts=4 model.encoder_seq_length=32"
        },
    ),
    "docs/guide/own_recipe.md": Page(
        added={"python pretrain_gpt.py": SMALL},
    ),
    "docs/guide/parallelism.md": Page(
        not_run={"python pretrain_gpt.py": "test_eight_ranks_with_every_axis_by_one_command"},
    ),
    "docs/guide/plan.md": Page(is_fast=True),
    "docs/guide/precision_schedule.md": Page(
        added={"megafp8 compare": SMALL},
        codes={"megafp8 compare": 6},
    ),
    "docs/guide/reports.md": Page(
        before=(FIRST, FIRST.replace("=first", "=second")),
        added={"megafp8 compare": SMALL},
        codes={"megafp8 compare": 6},
        not_run={
            "python examples/09": "test_recipes_of_your_own_get_a_verdict_each",
        },
    ),
    "docs/guide/fp8_health.md": Page(
        added={"megafp8 compare": SMALL},
        codes={"megafp8 compare": 6},
        not_run={"megafp8 compare --from": "test_variants_continue_a_checkpoint"},
    ),
    "docs/guide/recipe_check.md": Page(),
    "docs/guide/samples.md": Page(
        not_run={"OMP_NUM_THREADS=1 python benchmarks/documents.py": "measures for minutes"},
    ),
    "docs/guide/slurm.md": Page(
        added={
            "megafp8 preprocess index": f"{MODEL} {DATA}",
            "python pretrain_gpt.py -m hydra/launcher=joblib": SMALL,
        },
        not_run={
            "make setup": "downloads a CUDA build of PyTorch",
            "sbatch": SLURM,
            "LAUNCHER=torchrun sbatch": SLURM,
            "srun": SLURM,
            "python pretrain_gpt.py -m hydra/launcher=submitit_slurm": SLURM,
            "CONTAINER_IMAGE=": SLURM,
        },
    ),
    "docs/guide/te_on_cpu.md": Page(
        not_run={"pip install": "downloads"},
        te=("2.12.0",),
    ),
    "docs/guide/training.md": Page(
        added={
            "python pretrain_gpt.py": SMALL,
            "megafp8 pretrain --config-dir runs/first": "trainer.max_steps=4",
        },
        not_run={
            "torchrun": "needs two hosts: tests/hosts runs torchrun on two (make test-hosts)",
            "pip install": "downloads",
            "python pretrain_gpt.py -m hydra/sweeper=optuna": "needs Optuna's sweeper",
        },
    ),
}


def commands_of(text: str) -> list[tuple[str, list[str]]]:
    """Return each command of the console blocks, without its comment, and the lines below it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if line.startswith("$ "):
                found.append((re.sub(r"\s+# .*", "", line[2:]).strip(), []))
            else:
                found[-1][1].append(line)
    return found


COMMANDS = {
    page: commands
    for page in (
        "README.md",
        *(f"{name}/README.md" for name in packages()[1:]),
        *(f"docs/guide/{p.name}" for p in (ROOT / "docs/guide").glob("*.md")),
    )
    if (commands := commands_of((ROOT / page).read_text("utf-8")))
}


def row(rows: Mapping[str, object], command: str) -> str | None:
    """Return what the longest beginning of a command has in a table; None if none is in it."""
    return max((key for key in rows if command.startswith(key)), key=len, default=None)


def with_settings(command: str, more: str) -> str:
    """Return a command with more words: options at its end, and settings before its options.

    A setting takes the place of one with the same key.
    """
    settings = [word for word in more.split() if "=" in word]
    for word in settings:
        command = re.sub(rf"(?<= ){re.escape(word.partition('=')[0])}=\S+", "", command)
    begin, sign, options = command.partition(" --")
    others = [word for word in more.split() if "=" not in word]
    return " ".join([begin, *settings]) + sign + " ".join([options, *others])


def test_every_page_and_every_row_stands_for_commands() -> None:
    assert COMMANDS.keys() == PAGES.keys()
    for name, page in PAGES.items():
        commands = [command for command, _ in COMMANDS[name]]
        for rows in (page.added, page.not_run, page.codes):
            assert {row(rows, command) for command in commands} - {None} == rows.keys(), name
        for reason in page.not_run.values():
            assert set(re.findall(r"\btest_\w+", reason)) <= _tests(), reason
            for path in re.findall(r"\btests/\w+", reason):
                assert (ROOT / path).is_dir(), reason


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that looks like a clone: links to all that is in the repository."""
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("runs", "data", "multirun", "build"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "small").mkdir()
    build_dataset(tiny_corpus(lambda: tiny_documents(400)), 300, tmp_path / "small")
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if page.is_fast else pytest.mark.slow)
        for name, page in PAGES.items()
    ],
)
def test_the_commands_of_a_page_run(name: str, folder: Path) -> None:
    page = PAGES[name]
    for module in page.modules:
        pytest.importorskip(module, reason=f"{name} needs {module}")
    for version in page.te:
        need_sources(version)
    for path, target in page.links.items():
        (folder / path).symlink_to(ROOT / target)
    for path, text in page.files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, "utf-8")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
    for command, shown in [*((command, []) for command in page.before), *COMMANDS[name]]:
        if row(page.not_run, command) is not None:
            continue
        more = page.added.get(row(page.added, command) or "", "")
        given = with_settings(command, more)
        done = subprocess.run(
            ["bash", "-c", given], cwd=folder, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        code = page.codes.get(row(page.codes, command) or "", 0)
        assert done.returncode == code, f"{given}\n{done.stdout[-4000:]}"
        if not more:
            printed = " ".join(done.stdout.split())
            for line in shown:
                for part in line.split("…"):
                    assert " ".join(part.split()) in printed, f"{part}\n{done.stdout}"
