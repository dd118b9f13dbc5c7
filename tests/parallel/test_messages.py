"""Ranks exchange JSON and tensors: a message of another program cannot run code."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import pytest
import torch

from megafp8.config.errors import COMMAND_LINE, CombinedConfigError, SettingError
from megafp8.errors import CheckpointError, DataError, RunError, UserError
from megafp8.observe.utilization import Peak
from megafp8.parallel.messages import from_bytes, to_bytes
from megafp8.runs.directory import RunChoice
from megafp8.runs.lock import RunLock
from megafp8.specs import Fp8Recipe, FsdpSpec, ParallelSpec
from scripts.packages import ROOT, sources
from tests.kit.cases import Case
from tests.parallel import rank_messages
from tests.ranks import run_ranks
from tests.tiny import gpt_spec

PICKLED = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list", "rpc_sync", "rpc_async",
}  # fmt: skip
"""The functions of torch.distributed that pickle. (`new_group` sends only addresses, which the C++
code of torch reads.)"""


def test_no_module_uses_a_collective_that_pickles() -> None:
    files = [*sources(ROOT), *(ROOT / "examples").glob("*.py")]
    assert len(files) > 200
    for file in (*files, ROOT / "pretrain_gpt.py", ROOT / "finetune_gpt.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            name = getattr(node, "attr", None) or getattr(node, "id", None) or ""
            assert name not in PICKLED, f"{file}:{getattr(node, 'lineno', 0)}: {name}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [alias.name for alias in node.names]
                module = getattr(node, "module", None) or ""
                assert not {"pickle", "cPickle", "dill"} & {module, *modules}, file


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -0.5, math.inf, "a", "ü\n", [1, [2]], (1, "a", (None,)), {}, {"a": {1: 2}},
        {(1, 2): "x"}, frozenset({"a", "b"}), Path("/a/b"),
        Peak(device="CPU", tflops=1.0, products="BF16", fp8_tflops=None, source="measured"),
    ],
)  # fmt: skip
def test_values_come_as_they_were_sent(value: object) -> None:
    again = from_bytes(to_bytes(value))
    assert again == value and type(again) is type(value)
    assert math.isnan(from_bytes(to_bytes(math.nan)))


@pytest.mark.parametrize(
    "error",
    [
        UserError("x"),
        RunError("a\nb"),
        DataError(Path("f"), "field", "why", "hint"),
        CheckpointError("f", "why", "hint"),
        SettingError("model.seed", [1], "why", "hint", origin=COMMAND_LINE),
        CombinedConfigError([SettingError("a", torch.float32, "b", "c")] * 2),
    ],
)
def test_errors_come_as_they_were_raised(error: UserError) -> None:
    again = from_bytes(to_bytes(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert again.exit_code == error.exit_code


def test_the_lock_of_a_run_stays_with_its_process(tmp_path: Path) -> None:
    with RunLock.acquire(tmp_path) as lock:
        choice = RunChoice(tmp_path, True, "continues", lock, frozenset({"x"}))
        again = from_bytes(to_bytes(choice))
    assert again == RunChoice(tmp_path, True, "continues", None, frozenset({"x"}))


@pytest.mark.parametrize("value", [object(), print, torch.zeros(2), torch.float32, [b"x"]])
def test_other_kinds_are_a_bug(value: object) -> None:
    with pytest.raises(TypeError, match="ranks exchange no"):
        to_bytes(value)


def message(kind: str, **fields: object) -> bytes:
    return json.dumps({"of": kind, **fields}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x80\x04.", b"{}", b'{"of": "x"}', b"[" * 100_000,
        message("dataclass", **{"class": "subprocess:Popen", "items": {}}),
        message("dataclass", **{"class": "megafp8.files:shutil.rmtree", "items": {}}),
        message("dataclass", **{"class": "megafp8.runs.lock:RunLock", "items": {}}),
        message("error", **{"class": "builtins:SystemExit", "args": [], "state": {}}),
        message("error", **{"class": "megafp8.errors:ExitCode", "args": [], "state": {}}),
        message("enum", **{"class": "os:environ", "name": "x"}),
        message("tuple", **{"class": "megafp8.runs.directory:RunChoice", "items": []}),
    ],
)  # fmt: skip
def test_other_messages_are_refused(content: bytes) -> None:
    with pytest.raises(RunError, match="message of another rank cannot be read"):
        from_bytes(content)


@pytest.mark.parametrize("work", ["agree_on_values", "name_the_cause", "hold_other_parts"])
def test_two_ranks_agree(work: str) -> None:
    run_ranks(getattr(rank_messages, work), 2)


SMALL = gpt_spec(num_layers=2)
LAYOUTS = {
    "pipeline": ParallelSpec(pp=2),
    "tensor": ParallelSpec(tp=2, sequence_parallel=True),
    "FSDP": ParallelSpec(fsdp=FsdpSpec()),
}


def test_torch_pickles_nothing_in_a_step() -> None:
    """The functions with which torch pickles and unpickles objects raise in both ranks."""
    cases = {
        name: Case("fp32", Fp8Recipe(amax_history_len=4), SMALL, steps=1, parallel=spec)
        for name, spec in LAYOUTS.items()
    }
    run_ranks(rank_messages.without_pickles, 2, {"cases": cases})
