"""`model`: what a model of one run needs, in one flat section, as NeMo has it."""

from __future__ import annotations

from dataclasses import dataclass, field

from megafp8.config.keys import at_least, between, key, or_null
from megafp8.config.schema.accepted import PATH
from megafp8.config.schema.architecture import Architecture
from megafp8.config.schema.data import Data, Tokenizer
from megafp8.config.schema.layout import Layout
from megafp8.config.schema.optim import Optim
from megafp8.config.schema.precision import Precision
from megafp8.config.schema.profile import NsysProfile


@dataclass
class Model(Precision, Architecture, Layout):
    """The GPT, its batches, its FP8 recipe, its data and its optimizer."""

    seed: int = key(
        1234,
        "Seed of initial weights, dropout and the order of samples.",
        nemo=1234,
        kind="model",
        valid=between(0, 2**32 - 1),
    )
    resume_from_checkpoint: str | None = key(
        None,
        "The checkpoint, or the run, whose state a new run goes on from: weights, optimizer, "
        "scales, step and place in the data. A run that has a checkpoint of its own continues it.",
        nemo=None,
        kind="policy",
        valid=or_null(PATH),
    )
    gc_interval: int = key(
        0,
        "Collect Python's garbage every so many steps and at no other time, on all ranks at once; "
        "0: when Python does.",
        nemo=0,
        kind="layout",
        valid=at_least(0),
    )
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    nsys_profile: NsysProfile = field(default_factory=NsysProfile)
