"""A job that does not fit into memory is refused before its weights are made."""

from __future__ import annotations

import dataclasses

import pytest

from megafp8.errors import ConfigError, RunError
from megafp8.ops.memory import Limit
from megafp8.runs import enough_memory
from megafp8.runs.enough_memory import CHECK, Problem, decide, needs_of, problems, require_memory
from megafp8.train.build import build
from tests.tiny import run_spec, single_rank
from tests.train.runs import TWO_RANKS, Place

HUGE = [
    "model.optim.lr=2e-3",
    "model.num_layers=400",
    "model.hidden_size=16384",
    "model.ffn_hidden_size=65536",
]
GIB = 1 << 30


@pytest.mark.parametrize("ranks", [[], TWO_RANKS])
def test_a_model_that_cannot_fit_is_refused_at_once(place: Place, ranks: list[str]) -> None:
    done = place.run(*HUGE, *ranks)
    assert done.code == 2 and "Traceback" not in done.output, done.output
    who = "the job of 2 ranks on this machine" if ranks else "the job"
    assert f"the job does not fit into memory: {who} needs at least " in done.output
    assert " TiB, and " in done.output and "are there in all (the " in done.output
    assert "megafp8 plan" in done.output and f"{CHECK}=warn" in done.output
    assert not place.dir().exists(), "a run that was refused leaves nothing"


def test_an_absurd_batch_is_refused(place: Place) -> None:
    done = place.run("model.global_batch_size=1099511627776")
    assert done.code == 2 and "Traceback" not in done.output, done.output
    assert "model.global_batch_size=1099511627776" in done.output
    assert "at most 16777216" in done.output
    assert not place.dir().exists(), "a run that was refused leaves nothing"


def test_what_is_counted_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least that is counted is no more than what a run really keeps, and not much less."""
    spec = run_spec(compute="bf16")
    state = build(spec, single_rank())
    params = sum(p.numel() for p in state.model.parameters())
    weights = sum(p.numel() * p.itemsize for p in state.model.parameters())
    kept = weights + 4 * params + 8 * params + 4 * params  # masters, moments, gradients
    on_device, on_host = needs_of(spec, 0)
    data = spec.train.global_batch_size * spec.data.seq_length * 16
    assert 0.9 * kept < on_host - data <= kept and on_device == 0
    on_gpu = dataclasses.replace(
        spec, parallel=dataclasses.replace(spec.parallel, accelerator="gpu")
    )
    on_device, on_host = needs_of(on_gpu, 0)
    assert on_host == 4 * params + data and 0.9 * kept < on_device <= kept
    warned: list[str] = []
    monkeypatch.setattr(enough_memory, "process_limits", lambda: [])
    for free, said in ((GIB, 0), (1000, 1)):
        limit = Limit(GIB, free, "a limit")
        monkeypatch.setattr(enough_memory, "machine_limits", lambda limit=limit: [limit])
        require_memory(spec, single_rank(), warned.append)
        assert len(warned) == said
    assert "may not fit into memory: the job needs at least" in warned[0] and "a limit" in warned[0]
    limit = Limit(1000, 1000, "a limit")
    monkeypatch.setattr(enough_memory, "machine_limits", lambda: [limit])
    with pytest.raises(RunError, match=r"1000 B are there in all \(a limit\)"):
        require_memory(spec, single_rank(), warned.append)


def test_the_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = run_spec(compute="bf16")
    two = dataclasses.replace(spec.parallel, devices_per_node=2)
    spec = dataclasses.replace(spec, parallel=two)
    _, one = needs_of(spec, 0)
    monkeypatch.setattr(enough_memory, "process_limits", lambda: [])
    monkeypatch.setattr(enough_memory, "machine_limits", lambda: [limit])
    monkeypatch.setattr(enough_memory, "gather", lambda mesh, own: [own, own, own])
    for limit in (Limit(2 * one, GIB, "a limit"), Limit(2 * one - 1, GIB, "a limit")):
        if limit.num_bytes == 2 * one:  # the third rank is on another machine
            require_memory(spec, single_rank(), print)
        else:
            with pytest.raises(RunError, match="the job of 2 ranks on this machine needs at least"):
                require_memory(spec, single_rank(), print)


def test_limits_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = Limit(4 * GIB, 2 * GIB, "ulimit -v")
    assert problems(2 * GIB, [limit], "a rank") == []
    (close,) = problems(4 * GIB, [limit], "a rank")
    assert not close.is_certain and "2.0 GiB are free (ulimit -v)" in close.text
    (certain,) = problems(4 * GIB + 1, [limit], "a rank")
    assert certain.is_certain and "4.0 GiB are there in all (ulimit -v)" in certain.text
    spec = run_spec()
    monkeypatch.delenv(CHECK, raising=False)
    assert decide(spec, []) is None
    assert "may not fit" in (decide(spec, [close]) or "")
    with pytest.raises(RunError, match="a rank needs at least 4.0 GiB"):
        decide(spec, [close, certain])
    monkeypatch.setenv(CHECK, "warn")
    assert "does not fit into memory: a rank needs at least" in (decide(spec, [certain]) or "")
    monkeypatch.setenv(CHECK, "off")
    with pytest.raises(ConfigError, match=f"{CHECK}=off: is neither error nor warn"):
        decide(spec, [Problem("x", False)])
