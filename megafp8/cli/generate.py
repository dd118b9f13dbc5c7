"""Continue a text with a run's model.

megafp8 generate RUN --prompt "def " [--tokens 100] [--temperature 0]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megafp8.cli.commands import run_old_name
from megafp8.cli.export import DTYPES, dtype_named, home_of
from megafp8.cli.job import command_parser, reports_errors
from megafp8.config.errors import SettingError
from megafp8.data.tokenize import continuation
from megafp8.errors import CheckpointError, ExitCode, RunError
from megafp8.runs.tokenizer import find_tokenizer
from megafp8.secrets import printable, shown
from megafp8.specs import GPTSpec

if TYPE_CHECKING:  # the arguments are checked before torch, which takes seconds, is imported
    import torch

USUAL_TOKENS = 100
RUN_DTYPES = {"bf16": "bfloat16", "16": "float16"}


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print the text while it is generated; return 0, or 2 after printing an error."""
    parser = command_parser("generate", __doc__)
    parser.add_argument(
        "run",
        type=Path,
        help="a run's directory, a checkpoint, a folder of `megafp8 import`, or latest",
    )
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument(
        "--tokens", type=_count, help="largest number of new tokens (100, or what fits the model)"
    )
    parser.add_argument(
        "--temperature",
        type=_non_negative,
        default=0.8,
        help="temperature of the draws; 0 takes the most likely token (0.8)",
    )
    parser.add_argument("--top-k", type=_count, help="draw from the k most likely tokens only")
    parser.add_argument(
        "--top-p",
        type=_probability,
        help="draw from the most likely tokens whose probabilities add up to this number",
    )
    parser.add_argument("--seed", type=_seed, help="seed of the draws (1234)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the computation (the run's, without FP8)"
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (the GPU if there is one)")
    generate_text(parser.parse_args(argv))
    return ExitCode.FINISHED


def generate_text(options: argparse.Namespace) -> None:
    """Load the model, and print the prompt and its continuation.

    Raises:
        UserError: The run has no checkpoint or tokenizer, or the device cannot be used.
    """
    from megafp8.checkpoint.reader import Reader
    from megafp8.train.generate import Sampling, beyond_training, generate
    from megafp8.train.load import find_checkpoint
    from megafp8.train.load_model import load_model

    draws = {name: getattr(options, name) for name in ("top_k", "top_p", "seed")}
    given = {name: value for name, value in draws.items() if value is not None}
    if given and options.temperature == 0:
        name, value = next(iter(given.items()))
        raise SettingError(
            "--" + name.replace("_", "-"),
            value,
            "has no effect with --temperature 0, which draws nothing",
            "Leave it out, or give a temperature above 0",
        )
    sampling = Sampling(options.temperature, **given)
    checkpoint = find_checkpoint(options.run, _note)
    home = home_of(checkpoint)
    tokenizer = find_tokenizer(home)
    if tokenizer is None:
        raise CheckpointError(
            home / "tokenizer.json",
            "is missing, and there is no other kind of tokenizer",
            "Copy the tokenizer of the run's data there",
        )
    reader = Reader(checkpoint)
    dtype = options.dtype or run_dtype(reader.meta)
    device = _device(options.device)
    model = load_model(reader, dtype_named(dtype), device)
    _note(f"{checkpoint}: {dtype}, no FP8, on {device}")
    prompt = tokenizer.encode(options.prompt) or [tokenizer.eod_id]
    num_tokens = options.tokens or fitting_tokens(model.spec, len(prompt))
    warning = beyond_training(model.spec, len(prompt), num_tokens)
    if warning is not None:
        _note(f"warning: {warning}")
    tokens: list[int] = []
    written = ""
    _write(options.prompt)
    for token in generate(model, prompt, num_tokens, sampling, vocab_size=tokenizer.vocab_size):
        if token == tokenizer.eod_id:
            break
        tokens.append(token)
        text = continuation(tokenizer, prompt, tokens)
        if not text.endswith("\ufffd"):  # the last token is not a part of a character
            _write(text[len(written) :])
            written = text
    _write(continuation(tokenizer, prompt, tokens)[len(written) :] + "\n")


def _note(line: str) -> None:
    print(shown(line), file=sys.stderr, flush=True)


def _write(text: str) -> None:
    """Print a part of the text. A model of others may write what a terminal would obey."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def fitting_tokens(spec: GPTSpec, prompt: int) -> int:
    """Return how many tokens to generate after a prompt if no number is given.

    It is 100, or what the model's positions have left; at least 1, so that a prompt that is too
    long is refused with its own message.
    """
    return max(1, min(USUAL_TOKENS, spec.max_position_embeddings - prompt))


def run_dtype(meta: dict[str, Any]) -> str:
    """Return the name of the dtype that a run computed in; float32 for an imported model.

    `meta` is the meta data of the run's checkpoint.
    """
    precision = str(meta.get("config", {}).get("trainer", {}).get("precision", "32"))
    return next((name for key, name in RUN_DTYPES.items() if precision.startswith(key)), "float32")


def _device(name: str | None) -> torch.device:
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(f"--device {name}: {reason}. Use --device cpu") from error
    return device


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed: give 1 or more")
    return number


def _seed(text: str) -> int:
    number = int(text)
    if not 0 <= number < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not allowed: give from 0 to 2**63 - 1")
    return number


def _non_negative(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not allowed: give 0 or more")
    return number


def _probability(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed: give more than 0 and at most 1")
    return number


if __name__ == "__main__":
    run_old_name("generate")
