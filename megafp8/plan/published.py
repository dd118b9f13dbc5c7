"""List published pairs of runs that timed low precision beside BF16, slower ones too.

They stand beside the plan's own prediction, which no GPU has confirmed. A row is one pair of the
same job, as its source prints it; nothing here was measured by this project. The sources were read
on 28 November 2026.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megafp8.specs.gpus import Capability


@dataclass(frozen=True)
class Pair:
    """Hold one published pair; `ratio` is the speed over that of BF16 (FP16 where `job` says so).

    `recipe` is our name of the rule, or None where the source does not say which it was.
    """

    gpu: str
    capability: Capability
    recipe: str | None
    ratio: float
    job: str
    date: str
    source: str


_ADA, _HOPPER, _B200, _RTX = (8, 9), (9, 0), (10, 0), (12, 0)
PAIRS = (
    Pair("H100", _HOPPER, "delayed", 0.49, "GPT 1.5B, sequences of 1,024, torchao", "2024-11-16",
         "pytorch/ao issue 1297"),
    Pair("H100", _HOPPER, "delayed", 1.02, "the same job, Transformer Engine", "2024-11-16",
         "pytorch/ao issue 1297"),
    Pair("H100", _HOPPER, "delayed", 1.42, "GPT 13B, Megatron-LM", "2023-07-03",
         "NVIDIA/Megatron-LM issue 396"),
    Pair("H100", _HOPPER, "tensorwise", 0.71, "a small model, torchao without torch.compile",
         "2025-05-26", "pytorch/ao issue 2262"),
    Pair("H100", _HOPPER, None, 0.67, "ms-swift with Megatron, over FP16 (0.5 to 0.67)",
         "2025-12-10", "modelscope/ms-swift issue 6980"),
    Pair("8 H100", _HOPPER, None, 1.055, "mixture of experts, 24,000 steps", "2026-07",
         "marin-community/marin issue 7298"),
    Pair("L4", _ADA, "rowwise", 0.98, "Unsloth's own timing", "2026-10-26",
         "unsloth 2026.10.9, float8_training.py"),
    Pair("64 GB200", _B200, "mxfp8", 0.75, "mixture of experts 48 x 6,144, 128 experts",
         "2026-07-21", "marin-community/marin issue 7201"),
    Pair("8 B200", _B200, "mxfp8", 1.20, "Llama-3-8B, sequences of 8,192, torchtitan", "2026-08",
         "pytorch/torchtitan, mxfp8.md"),
    Pair("8 B200", _B200, "tensorwise", 1.25, "the same job", "2026-08",
         "pytorch/torchtitan, mxfp8.md"),
    Pair("4 Blackwell", _B200, "mxfp8", 1.28, "Llama-3-8B, sequences of 2,048, torchtitan",
         "2026-08", "pytorch/torchtitan, nvfp4.md"),
    Pair("4 Blackwell", _B200, "nvfp4", 1.37, "the same job, last layers in BF16", "2026-08",
         "pytorch/torchtitan, nvfp4.md"),
    Pair("RTX PRO 6000", _RTX, "tensorwise", 1.15, "Unsloth's own timing", "2026-10-26",
         "unsloth 2026.10.9, float8_training.py"),
    Pair("RTX PRO 6000", _RTX, "rowwise", 0.97, "Unsloth's own timing", "2026-10-26",
         "unsloth 2026.10.9, float8_training.py"),
)  # fmt: skip


def about_pairs(recipe: str, capability: Capability | None) -> Iterator[str]:
    """Yield what was published of a recipe on GPUs of a capability: the range, and the slowest."""
    found = [pair for pair in PAIRS if pair.recipe == recipe and pair.capability == capability]
    if not found:
        return
    low, high = (choose(found, key=lambda pair: pair.ratio) for choose in (min, max))
    span = f"{low.ratio:g}" if len(found) == 1 else f"{low.ratio:g} to {high.ratio:g}"
    yield (
        f"published pairs of {recipe} and BF16 on such a GPU: {span} times the speed; the slowest: "
        f"{low.job} on {low.gpu} ({low.source}, {low.date})"
    )


def rows() -> Iterator[str]:
    """Yield the table as rows of Markdown, slowest first in each kind of GPU."""
    yield "| GPU | recipe | times BF16's speed | job | date | source |"
    yield "|---|---|---|---|---|---|"
    for pair in sorted(PAIRS, key=lambda pair: (pair.capability, pair.ratio)):
        recipe = "not said" if pair.recipe is None else f"`{pair.recipe}`"
        ratio = f"**{pair.ratio:g}**" if pair.ratio < 1 else f"{pair.ratio:g}"
        yield f"| {pair.gpu} | {recipe} | {ratio} | {pair.job} | {pair.date} | {pair.source} |"
