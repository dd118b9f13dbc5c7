"""Continue texts with a run's model, or let it answer in a conversation.

megafp8 generate RUN --prompt "def " [--tokens 100] [--temperature 0] [--stop TEXT]
megafp8 generate RUN --prompt "def " --prompt "class " [--prompts FILE] [--json]
megafp8 generate RUN --chat --prompt "What is FP8?" [--system TEXT]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megafp8.cli.commands import run_old_name
from megafp8.cli.export import DTYPES, dtype_named, home_of
from megafp8.cli.job import command_parser, number_in, reports_errors
from megafp8.config.errors import SettingError
from megafp8.data.conversations import Chat, ConversationError, is_conversation, question_of
from megafp8.data.examples import Example, is_text, read_prompts
from megafp8.data.tokenize import Tokenizer, continuation, frame_of
from megafp8.errors import CheckpointError, DataError, ExitCode, RunError
from megafp8.runs.tokenizer import end_ids, find_tokenizer, read_generation, with_all_files
from megafp8.secrets import printable, shown
from megafp8.specs import GPTSpec

if TYPE_CHECKING:  # the arguments are checked before torch, which takes seconds, is imported
    import torch

    from megafp8.models.gpt import GPT
    from megafp8.train.generate import Sampling

USUAL_TOKENS = 100
RUN_DTYPES = {"bf16": "bfloat16", "16": "float16"}
BATCH = 16
"""The largest number of prompts that are continued at once."""

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""The text of a token that stands for a byte in vocabularies of SentencePiece's kind."""

NEUTRAL = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "num_beams": 1,
    "guidance_scale": 1.0,
}
NOT_APPLIED = (
    *NEUTRAL,
    "min_new_tokens",
    "bad_words_ids",
    "begin_suppress_tokens",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "sequence_bias",
    "stop_strings",
)
"""Keys of a configuration of generation that change the tokens which transformers chooses, at any
temperature, and not ours; `NEUTRAL` has their values without effect."""

_count = number_in(int, lambda n: n >= 1, "1 or more")


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print the text while it is generated; return 0, or 2 after printing an error."""
    parser = command_parser("generate", __doc__)
    parser.add_argument(
        "run",
        type=Path,
        help="a run's directory, a checkpoint, a folder of `megafp8 import`, or latest",
    )
    parser.add_argument(
        "--prompt", action="append", default=[], help="a text to continue; may be given repeatedly"
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="texts to continue: one in each line, or JSONL, JSON or Parquet with the field prompt "
        "(with --chat also messages)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="take prompts as messages of a user, by the chat template of the model's tokenizer, "
        "and print the answers alone",
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the first message")
    parser.add_argument(
        "--tokens", type=_count, help="largest number of new tokens (100, or what fits the model)"
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text, beside the model's end tokens; may be given repeatedly",
    )
    for name, what in (("bos", "begin the prompt with the token that begins a text"),
                       ("eos", "end the prompt with the token that ends a text")):  # fmt: skip
        parser.add_argument(
            f"--add-{name}",
            action=argparse.BooleanOptionalAction,
            help=f"{what} (as the tokenizer does)",
        )
    parser.add_argument(
        "--temperature",
        type=number_in(float, lambda x: 0 <= x < float("inf"), "0 or more"),
        default=0.8,
        help="temperature of the draws; 0 takes the most likely token (0.8)",
    )
    parser.add_argument("--top-k", type=_count, help="draw from the k most likely tokens only")
    parser.add_argument(
        "--top-p",
        type=number_in(float, lambda x: 0 < x <= 1, "more than 0 and at most 1"),
        help="draw from the most likely tokens whose probabilities add up to this number",
    )
    parser.add_argument(
        "--seed",
        type=number_in(int, lambda n: 0 <= n < 2**63, "from 0 to 2**63 - 1"),
        help="seed of the draws, of each prompt (1234)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object with prompt and text for each"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the computation (the run's, without FP8)"
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (the GPU if there is one)")
    generate_text(parser.parse_args(argv))
    return ExitCode.FINISHED


@dataclass
class Answer:
    """Hold a prompt and the text that follows it, as far as it is known.

    Attributes:
        tokenizer: The model's tokenizer.
        words: The text of each token in its vocabulary.
        prompt: The prompt's text.
        shown: What is printed before the text that follows.
        ids: The prompt's tokens.
        limit: The largest number of tokens that may follow.
        ends: The tokens that end the text.
        stops: The texts before which it ends.
        tokens: The tokens that follow, without one of `ends`.
        text: Their text, without what a further token may still change.
        end: Why the text has ended: `token`, `stop` or `length`; None while it has not.
    """

    tokenizer: Tokenizer
    words: Mapping[int, str]
    prompt: str
    shown: str
    ids: list[int]
    limit: int
    ends: frozenset[int]
    stops: Sequence[str]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    end: str | None = None

    def add(self, token: int) -> str:
        """Add a token; return the text that is certain from now on."""
        if token in self.ends:
            return self._ended("token", self._whole())
        self.tokens.append(token)
        whole = self._whole()
        found = [at for stop in self.stops if (at := whole.find(stop)) >= 0]
        if found:
            return self._ended("stop", whole[: min(found)])
        if len(self.tokens) == self.limit:
            return self._ended("length", whole)
        # The last token may be a part of a character, and more bytes change how these are read.
        if whole.endswith("\ufffd") or _BYTE.fullmatch(self.words.get(token, "")):
            return ""
        open_stops = (
            n for stop in self.stops for n in range(len(stop)) if whole.endswith(stop[:n])
        )
        return self._certain(whole[: len(whole) - max(open_stops, default=0)])

    def _whole(self) -> str:
        return continuation(self.tokenizer, self.ids, self.tokens)

    def _ended(self, end: str, text: str) -> str:
        self.end = end
        return self._certain(text)

    def _certain(self, text: str) -> str:
        """Return what `text` adds; it may be shorter while the beginning of a stop is open."""
        more = text[len(self.text) :]
        self.text += more
        return more


def generate_text(options: argparse.Namespace) -> None:
    """Load the model, and print the prompts and their continuations.

    Raises:
        UserError: The run has no checkpoint or tokenizer, a file or an option cannot be used, or a
            prompt is too long. Nothing has been printed then.
    """
    from megafp8.checkpoint.reader import Reader
    from megafp8.train.generate import Sampling, beyond_training, check_prompt
    from megafp8.train.load import find_checkpoint
    from megafp8.train.load_model import load_model, shape_of

    sampling = Sampling(options.temperature, **_draws(options))
    typed = enumerate(options.prompt, start=1)
    prompts = [Example({"prompt": text}, "--prompt", f"number {n}") for n, text in typed]
    prompts = [*prompts, *(read_prompts(options.prompts) if options.prompts else [])]
    if not prompts:
        raise SettingError("--prompt", None, "is missing", "Give --prompt TEXT or --prompts FILE")
    if options.system is not None and not options.chat:
        raise SettingError("--system", options.system, "has no effect here", "Add --chat")
    if "" in options.stop:
        raise SettingError("--stop", "", "is empty", "Give the text before which to end")
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
    config = reader.meta.get("config", {})
    files = with_all_files(home, config.get("restore_from_path"))
    spec, ends = shape_of(reader), frozenset(end_ids(files, tokenizer.eod_id))
    if options.chat:
        chat = Chat(files, tokenizer, ends)
        asked = [_question(chat, one, options.system) for one in prompts]
    else:
        asked = [(text, text) for text in map(_text_of, prompts)]
    rendered = prompt_ids(options, tokenizer, [text for _, text in asked])
    answers, words = [], tokenizer.tokens()
    for (prompt, text), ids in zip(asked, rendered, strict=True):
        limit = options.tokens or fitting_tokens(spec, len(ids))
        check_prompt(spec, ids, limit)
        shown_before = "" if options.chat else text
        answers.append(
            Answer(tokenizer, words, prompt, shown_before, ids, limit, ends, options.stop)
        )
    dtype = options.dtype or run_dtype(reader.meta)
    device = _device(options.device)
    model = load_model(reader, dtype_named(dtype), device)
    _note(f"{checkpoint}: {dtype}, no FP8, on {device}")
    if (line := _not_applied(read_generation(files), tokenizer.vocab_size)) is not None:
        _note(line)
    warnings = (beyond_training(spec, len(a.ids), a.limit) for a in answers)
    for warning in dict.fromkeys(line for line in warnings if line is not None):
        _note(f"warning: {warning}")
    _print(model, answers, sampling, as_json=options.json)


def _draws(options: argparse.Namespace) -> dict[str, Any]:
    """Return the given options of draws.

    Raises:
        SettingError: One is given, and nothing is drawn.
    """
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
    return given


def _text_of(example: Example) -> str:
    """Return the prompt of an example.

    Raises:
        DataError: There is none, or it is no text.
    """
    prompt = example.fields.get("prompt")
    if not isinstance(prompt, str):
        reason = "is missing" if prompt is None else f"is of type {type(prompt).__name__}"
        hint = "Write the text to continue there"
        if is_conversation(example):
            hint += ", or add --chat for conversations"
        raise DataError(example.where, "prompt", reason, hint)
    if not is_text(prompt):
        hint = "Write it in UTF-8, and whole characters"
        raise DataError(example.where, "prompt", "has bytes or halves that are no character", hint)
    return prompt


def _question(chat: Chat, example: Example, system: str | None) -> tuple[str, str]:
    """Return the last message of a conversation, and its text with the beginning of an answer.

    Raises:
        DataError: The example has no conversation, or the chat template refuses it.
    """
    try:
        talk = question_of(example.fields, system)
        return str(talk.messages[-1].get("content")), chat.text(talk, asks=True)
    except ConversationError as error:
        raise DataError(example.where, error.field, error.reason, error.hint) from error


def prompt_ids(
    options: argparse.Namespace, tokenizer: Tokenizer, prompts: Sequence[str]
) -> list[list[int]]:
    """Return the tokens of prompts, as the tokenizer of the model reads a text.

    A chat template writes the tokens out that begin a conversation and end its turns.
    """
    end = () if options.chat else tokenizer.end
    if options.add_eos is not None:
        end = (tokenizer.eod_id,) if options.add_eos else ()
    add_bos = bool(options.add_bos) if options.chat else options.add_bos
    frame = frame_of(tokenizer, add_bos, (), "--add-bos")
    found = [[*frame.around(ids), *end] for ids in tokenizer.encode_marked(prompts)]
    return [ids or [tokenizer.eod_id] for ids in found]


def _not_applied(generation: dict[str, Any], vocab_size: int) -> str | None:
    """Return a note about the model's settings of generation that have an effect elsewhere only."""
    found = {
        key: value
        for key in NOT_APPLIED
        if (value := generation.get(key)) is not None and value != NEUTRAL.get(key)
    }
    suppressed = generation.get("suppress_tokens") or []
    if any(isinstance(n, int) and n < vocab_size for n in suppressed):
        found["suppress_tokens"] = "…"
    if not found:
        return None
    named = ", ".join(f"{key}={value}" for key, value in found.items())
    return f"note: not applied here, but by transformers (generation_config.json): {named}"


def _print(model: GPT, answers: Sequence[Answer], sampling: Sampling, *, as_json: bool) -> None:
    """Print each prompt and what follows it, in order; a single one while it is generated."""
    if len(answers) == 1 and not as_json:
        (answer,) = answers
        _write(answer.shown)
        for _, text in _generated(model, answers, sampling):
            _write(text)
        _write("\n")
        return
    by_length = sorted(range(len(answers)), key=lambda number: len(answers[number].ids))
    for first in range(0, len(answers), BATCH):
        batch = [answers[number] for number in by_length[first : first + BATCH]]
        for _ in _generated(model, batch, sampling):
            pass
    for answer in answers:
        if as_json:
            fields = {"prompt": answer.prompt, "text": answer.text, "end": answer.end}
            _write(json.dumps(fields, ensure_ascii=False) + "\n")
        else:
            _write(f"{answer.shown}{answer.text}\n")


def _generated(
    model: GPT, answers: Sequence[Answer], sampling: Sampling
) -> Iterator[tuple[Answer, str]]:
    """Continue prompts until all have ended; yield what each token adds to an answer's text."""
    from megafp8.train.generate import generate_batch

    done: set[int] = set()
    steps = generate_batch(
        model,
        [answer.ids for answer in answers],
        [answer.limit for answer in answers],
        sampling,
        vocab_size=answers[0].tokenizer.vocab_size,
        done=done,
    )
    for tokens in steps:
        for number, (answer, token) in enumerate(zip(answers, tokens, strict=True)):
            if token is not None:
                yield answer, answer.add(token)
            if answer.end is not None:
                done.add(number)


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


if __name__ == "__main__":
    run_old_name("generate")
