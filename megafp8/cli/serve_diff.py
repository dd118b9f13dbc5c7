"""Compare the forward pass that a run was trained with with the one that its export is served with.

megafp8 serve-diff RUN[@STEP] --as fp8 [--fp8-scales channel] [--fp8-inputs dynamic]
megafp8 serve-diff RUN[@STEP] --as mxfp8|nvfp4|bfloat16 [--json] [--page FILE]

Both sides read the run's own validation data on a CPU: the run's model as it evaluates, and the
bytes that `megafp8 export` writes with the same options, with inputs cast as the format says. KL is
that of (trained || served), in nats for a token. Each rule in which the two differ is then set as
in training by itself, and what becomes of the KL says which rule the difference comes from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megafp8 import __version__
from megafp8.cli.commands import run_old_name
from megafp8.cli.export_quantized import (
    BLOCK_KINDS,
    FP8,
    LAYOUTS,
    OPTIONS,
    QUANTIZED,
    SAMPLES,
    SCALES,
    QuantizedOptions,
    add_quantized_options,
    plan_quantized,
    quantized_options,
)
from megafp8.cli.job import command_parser, new_file, reports_errors
from megafp8.errors import ExitCode, RunError, UserError
from megafp8.files import write_atomically
from megafp8.observe.units import format_bytes
from megafp8.report import tables
from megafp8.report.page import PAGE_START, stylesheet
from megafp8.report.writer import require_page
from megafp8.secrets import say, shown

if TYPE_CHECKING:  # the arguments are checked before torch, which takes seconds, is imported
    from megafp8.checkpoint.reader import Reader
    from megafp8.train.serve_casts import Form
    from megafp8.train.serve_diff import Result
    from megafp8.train.serve_sides import Sides

BF16 = "bfloat16"
SAMPLES_FLAG = "--validation-samples"
_EXPERT = re.compile(r"experts\.\d+")
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""A title, the names of columns, and rows; the first column is text."""


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print the comparison, and write the page; return 0, or 2 after printing an error."""
    parser = command_parser("serve-diff", __doc__)
    parser.add_argument(
        "run", metavar="RUN[@STEP]", help="a run, one of its checkpoints, or latest"
    )
    parser.add_argument(
        "--as", dest="dtype", choices=(BF16, *QUANTIZED), required=True, help="how it is served"
    )
    add_quantized_options(parser)
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.add_argument("--page", type=new_file, metavar="FILE", help="write an HTML page")
    options = parser.parse_args(argv)
    asked = quantized_options(options, "--as", of_all=("validation_samples",))
    samples = SAMPLES if options.validation_samples is None else options.validation_samples
    if not samples:
        raise RunError(f"{SAMPLES_FLAG} 0: leaves nothing to compare. Give some")
    if options.page is not None:
        require_page(options.page, "Name another file with --page")
    found = serve_diff(options.run, asked, samples, quiet=options.json)
    if options.page is not None:
        try:
            write_atomically(options.page, found.page())
        except OSError as error:
            raise RunError(f"{options.page}: cannot be written ({error.strerror})") from error
    if options.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        say(*found.lines())
    return ExitCode.FINISHED


class Compared(NamedTuple):
    """Hold a comparison with what was compared, and put it into words.

    Attributes:
        checkpoint: The checkpoint.
        trained_in: The recipes and the dtype of training, in words.
        served_as: The form, in words.
        inputs: How its inputs are cast, in words; "" in BF16.
        result: What was found.
        notes: What the user should know of programs that load such an export.
    """

    checkpoint: Path
    trained_in: str
    served_as: str
    inputs: str
    result: Result
    notes: list[str]

    def lines(self) -> Iterator[str]:
        """Yield the comparison as lines."""
        yield from (self.title, *(f"  {line}" for line in self.summary()))
        for title, heads, rows in self.tables():
            yield title
            widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
            for row in (heads, *rows):
                first, *others = zip(row, widths, strict=True)
                cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
                yield f"  {'  '.join(cells)}".rstrip()
        yield self.cause()
        yield from self.notes

    @property
    def title(self) -> str:
        """Return what is compared."""
        return f"{self.checkpoint}: trained in {self.trained_in}, served as {self.served_as}"

    def summary(self) -> Iterator[str]:
        """Yield the distances of the two."""
        of, result = self.result.served.as_json(), self.result
        if self.inputs:
            yield f"inputs as served: {self.inputs}"
        loss = result.trained.loss / result.trained.tokens
        yield (
            f"{result.num_samples} samples of the run's validation data, {result.trained.tokens} "
            f"tokens; loss {loss:.4f} as trained, {of['loss']:.4f} as served"
        )
        yield (
            f"KL (trained || served): {of['kl']:.3g} nats a token; the first choice agrees for "
            f"{of['first_choice_agrees']:.2%}"
        )
        yield (
            f"log-probabilities of the targets differ by {of['logprob_mean_difference']:.3g}, at "
            f"most by {of['logprob_largest_difference']:.3g}"
        )
        both = ("weights", result.weights), ("inputs", result.inputs)
        shares = (f"{_share(sum(of.values(), start=_nothing()))} of {name}" for name, of in both)
        yield f"bytes that differ: {', '.join(shares)}"
        yield f"tensors of the export: {format_bytes(result.num_bytes)} ({result.num_bytes} bytes)"

    def tables(self) -> Iterator[Table]:
        """Yield the rules, what else a server may do, and the linears."""
        from megafp8.train.serve_sides import RULES

        result = self.result
        kl = result.served.kl / result.served.tokens
        rules = [
            (
                RULES[key][1],
                f"{result.rules[key].kl / result.served.tokens:.3g}",
                f"{result.explained(key):.3g}",
                f"{result.explained(key) / kl:.0%}" if kl else "",
                _share(result.left[key]),
            )
            for key in result.ranked()
        ]
        if rules:
            heads = (
                "rule, set as in training alone",
                "KL then",
                "explains",
                "share",
                "weights left",
            )
            yield "where the difference comes from:", heads, rules
        more = [(name, f"{of.kl / of.tokens:.3g}") for name, of in result.more.items()]
        yield "if the server also did more:", ("what", "KL then"), more
        of_linears: dict[str, tuple[Any, Any]] = {}
        for name, weight in result.weights.items():  # the experts of a layer are one row
            both, row = (weight, result.inputs[name]), _EXPERT.sub("experts.*", name)
            before = of_linears.get(row, (_nothing(), _nothing()))
            of_linears[row] = before[0] + both[0], before[1] + both[1]
        linears = [(row, *(f(x) for x in both for f in (_share, _scales)))
                   for row, both in of_linears.items()]  # fmt: skip
        heads = ("bytes that differ", "weight", "its scales", "input", "its scales")
        yield "by linear (both casts read the trained input):", heads, linears

    def cause(self) -> str:
        """Return the rule that explains most, in words, and where it is not in all linears."""
        from megafp8.train.serve_sides import RULES

        if not self.result.served.kl:
            return "cause: there is no difference to explain"
        if (key := self.result.cause()) is None:
            return "cause: no rule by itself makes the difference smaller"
        where, total = self.result.places[key], len(self.result.weights)
        place = f" in {where[0]}" if where else ""
        place += f" and {len(where) - 1} more of {total} linears" if len(where) > 1 else ""
        return f"cause: {RULES[key][1]}{place if len(where) < total else ''}"

    def as_json(self) -> dict[str, Any]:
        """Return the comparison for a JSON file."""
        result = self.result
        return {
            "checkpoint": str(self.checkpoint),
            "trained_in": self.trained_in,
            "served_as": _with_inputs(self.served_as, self.inputs),
            "num_samples": result.num_samples,
            "num_tokens": result.trained.tokens,
            "trained_loss": result.trained.loss / result.trained.tokens,
            "served": result.served.as_json(),
            "cause": result.cause(),
            "rules": [
                {
                    "rule": key,
                    "explained_kl": result.explained(key),
                    "weight_bytes_left": result.left[key].differ,
                    "linears": result.places[key],
                    **result.rules[key].as_json(),
                }
                for key in result.ranked()
            ],
            "more": {name: distance.as_json() for name, distance in result.more.items()},
            "linears": {
                name: {"weight": weight._asdict(), "input": result.inputs[name]._asdict()}
                for name, weight in result.weights.items()
            },
            "export_bytes": result.num_bytes,
        }

    def page(self) -> str:
        """Return the comparison as an HTML page that needs no network."""
        body = [f"<h1>{escape(shown(self.title))}</h1>"]
        is_same = "different" if self.result.served.kl else "same"
        body.append(f"<div class='verdict {is_same}'><span>{escape(self.cause())}</span></div>")
        body += (f"<p class=lead>{escape(line)}</p>" for line in (*self.summary(), *self.notes))
        for title, heads, rows in self.tables():
            cells = (
                [tables.label(row[0]), *(tables.cell(t, "number") for t in row[1:])] for row in rows
            )
            body.append(f"<h2>{escape(title.rstrip(':'))}</h2>{tables.table(heads, cells)}")
        body.append(f"<footer>Written by megafp8 {__version__}.</footer></body></html>\n")
        style = f"<title>Trained and served</title><style>{stylesheet()}</style></head><body>"
        return "".join((PAGE_START, style, *body))


def _nothing() -> Any:
    from megafp8.train.serve_casts import NOTHING

    return NOTHING


def _share(of: Any) -> str:
    return f"{of.differ / of.bytes:.2%}" if of.bytes else ""


def _scales(of: Any) -> str:
    return f"{of.scales / of.numbers:.2%}" if of.numbers else ""


def serve_diff(
    run: str, asked: QuantizedOptions | None, samples: int, *, quiet: bool = False
) -> Compared:
    """Return how far a run is from its export; `asked` None is one in BF16.

    Raises:
        UserError: There is no such checkpoint, its model or data cannot be compared, or no format
            has such an export.
    """
    from megafp8.checkpoint.reader import Reader
    from megafp8.jobs.starts import named_checkpoint
    from megafp8.train.load import find_checkpoint
    from megafp8.train.recorded import recorded_recipes, recorded_values, validation_data
    from megafp8.train.serve_diff import compare
    from megafp8.train.serve_sides import Sides

    notify = (lambda line: None) if quiet else say
    reader = Reader(find_checkpoint(named_checkpoint(run), notify))
    sides = Sides.of(reader, notify)
    form, words, inputs, notes = _form(reader, sides, asked)
    data = validation_data(reader, samples, notify)
    result = compare(sides, form, data.batches)
    result.num_samples = data.num_samples
    values = recorded_values(reader)
    trained_in = [*recorded_recipes(values), str(values["trainer.precision"])]
    return Compared(reader.path, " and ".join(trained_in), words, inputs, result, notes)


def _with_inputs(form: str, inputs: str) -> str:
    return f"{form}, inputs: {inputs}" if inputs else form


def _form(
    reader: Reader, sides: Sides, asked: QuantizedOptions | None, family: str | None = None
) -> tuple[Form, str, str, list[str]]:
    """Return what an export writes, that and its inputs in words, and the notes to it."""
    if asked is None:
        return None, BF16, "", []
    planned = plan_quantized(reader, sides.spec, asked, family)
    scales = asked.fp8_scales if asked.scale_fmt == "float" else f"block, {asked.scale_fmt}"
    about = f"{asked.dtype} ({scales})" if asked.dtype == FP8 else asked.dtype
    return planned.fmt, about, planned.inputs[1], list(planned.notes())


# ---- the form that is closest to training


def forms_of(given: Mapping[str, Any]) -> Iterator[QuantizedOptions | None]:
    """Yield the forms that an export may have; those of `given` options alone.

    None is BF16, which has none of the options of quantized weights.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    if chosen.keys() <= {"dtype", "validation_samples"} and chosen.get("dtype", BF16) == BF16:
        yield None
    layout = chosen.get("layout", LAYOUTS[0])
    every = [
        *({"fp8_scales": scales, "fp8_inputs": inputs, "scale_fmt": "float"}
          for scales in SCALES for inputs in ("static", "dynamic")
          if (scales, inputs) != ("block", "static")),
        {"fp8_scales": "block", "fp8_inputs": "dynamic", "scale_fmt": "ue8m0"},
        *({"dtype": kind, "layout": layout} for kind in BLOCK_KINDS),
        *({"dtype": kind, "layout": layout, "fp8_inputs": "static"}
          for kind in BLOCK_KINDS if kind in OPTIONS["fp8_inputs"]),
    ]  # fmt: skip
    for more in every:
        has = {"dtype": FP8, **more}
        if all(has.get(k) == v for k, v in chosen.items() if k != "validation_samples"):
            samples = chosen.get("validation_samples", SAMPLES)
            yield QuantizedOptions(**has, validation_samples=samples)


class Ranked(NamedTuple):
    """Hold the KL of a form, in nats a token; `asked` None is BF16."""

    kl: float
    asked: QuantizedOptions | None
    words: str


def by_kl(run: Path, given: Mapping[str, Any], family: str | None = None) -> list[Ranked]:
    """Return the forms that `given` options leave open, the one closest to training first.

    Raises:
        UserError: No form can express the model, or it cannot be compared.
    """
    from megafp8.checkpoint.reader import Reader
    from megafp8.train.load import find_checkpoint
    from megafp8.train.recorded import validation_data
    from megafp8.train.serve_diff import compare
    from megafp8.train.serve_sides import Sides

    reader = Reader(find_checkpoint(run, say))
    sides, refused = Sides.of(reader, say), list[str]()
    samples = given.get("validation_samples")
    data = validation_data(reader, SAMPLES if samples is None else samples, say)
    found = []
    for asked in forms_of(given):
        try:
            form, words, inputs, _ = _form(reader, sides, asked, family)
        except UserError as error:
            refused.append(str(error))
            continue
        served = compare(sides, form, data.batches, only=True).served
        of_form = _with_inputs(words, inputs)
        found.append(Ranked(served.kl / served.tokens, asked, of_form))
    if not found:
        raise RunError(
            refused[0] if refused else "--closest-to-training: no form has these options"
        )
    return sorted(found, key=lambda each: each.kl)


if __name__ == "__main__":
    run_old_name("serve_diff")
