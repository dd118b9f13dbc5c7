"""Positions and document numbers reach the model in training, evaluation and diagnosis."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from megafp8.backends.te.backend import TeBackend
from megafp8.data.loader import DocumentRules, Microbatch, microbatch
from megafp8.train.nonfinite import first_nonfinite
from megafp8.train.report.header import documents_of
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from megafp8.train.validate import evaluate
from tests.tiny import SEQ, VOCAB, build_run, run_spec


def batch(**switches: bool) -> Microbatch:
    windows = np.random.default_rng(0).integers(0, 6, (2, SEQ + 1)) % VOCAB
    return microbatch(list(windows), DocumentRules(eod_id=3, **switches))


def recorded(state: TrainState) -> list[dict[str, torch.Tensor]]:
    """Record the arguments of the model's calls from now on, other than tokens and targets."""
    seen: list[dict[str, torch.Tensor]] = []
    forward = state.model.forward

    def recording(tokens: torch.Tensor, targets: torch.Tensor, **more: Any) -> torch.Tensor:
        seen.append(more)
        return forward(tokens, targets)

    state.model.forward = recording  # type: ignore[method-assign,assignment]
    return seen


def test_the_model_gets_them_everywhere() -> None:
    state = build_run()
    seen = recorded(state)
    given = batch(reset_position_ids=True, reset_attention_mask=True)
    train_step(state, [given])
    evaluate(state, [given])
    first_nonfinite(state, [given])
    assert len(seen) == 3
    for more in seen:
        assert np.array_equal(more["position_ids_BS"].numpy(), given.position_ids_BS)
        assert np.array_equal(more["cu_seqlens_N1"].numpy(), given.cu_seqlens_N1)
        assert more["cu_seqlens_N1"].dtype == torch.int32


def test_the_model_gets_none_where_none_is_asked_for() -> None:
    state = build_run()
    seen = recorded(state)
    train_step(state, [batch()])
    assert seen == [{}]


def test_the_header_says_how_documents_are_kept_apart() -> None:
    state = build_run()
    spec = run_spec()
    assert documents_of(spec, state) == []
    data = dataclasses.replace(spec.data, reset_attention_mask=True)
    (line,) = documents_of(dataclasses.replace(spec, data=data), state)
    assert line == "documents: attention within each one, in blocks of the scores that are seen"
    packed = dataclasses.replace(spec, data=data)
    engine = object.__new__(TeBackend)  # it needs a device alone to say this
    on_te = dataclasses.replace(state, backend=engine)
    for device, end in (("cpu", "thd and padding_causal"), ("cuda", "no GPU has run this yet")):
        engine.device = torch.device(device)
        (line,) = documents_of(packed, on_te)
        assert "by Transformer Engine's thd and padding_causal" in line and line.endswith(end)
    graphs: Any = object()
    (line,) = documents_of(packed, dataclasses.replace(state, graphs=graphs))
    assert line.endswith("by a mask of all scores, as CUDA graphs have fixed shapes")


def test_masked_ends_are_not_counted() -> None:
    state = build_run()
    plain, masked = batch(), batch(eod_mask_loss=True)
    ends = int((plain.tokens_BS == 3).sum())
    assert ends > 0
    num_tokens = train_step(state, [plain]).num_tokens
    assert train_step(state, [masked]).num_tokens == num_tokens - ends
