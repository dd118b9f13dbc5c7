"""Fine-tune on Python's own documentation: the question is a signature, the answer its summary.

    python examples/08_fine_tune_on_signatures.py make data    # writes train.jsonl and test.jsonl
    python finetune_gpt.py restore_from_path=runs/first exp_manager.name=answers \
        model.data.train_ds.file_names=data/train.jsonl
    python examples/08_fine_tune_on_signatures.py score runs/first data/test.jsonl
    python examples/08_fine_tune_on_signatures.py score runs/answers data/test.jsonl

`make` reads the standard library by `inspect`, without a network. `score` prints the loss of the
answers, and how many of them a run's model gives word for word (greedy generation).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from megafp8.checkpoint.reader import Reader
from megafp8.data.loader import validation_batches
from megafp8.data.tokenize import continuation
from megafp8.runs.run_data import open_data
from megafp8.specs import DataSpec, InstructionSpec, TokenizerSpec
from megafp8.train.generate import Sampling, generate
from megafp8.train.load import find_checkpoint
from megafp8.train.load_model import load_model

NOT_IMPORTED = ("antigravity", "idlelib", "lib2to3", "this", "turtledemo")  # they open something
TEST_SHARE = 10  # every tenth name, by its hash, is a test
LONGEST_ANSWER = 40  # tokens


def questions() -> Iterator[tuple[str, str, str]]:
    """Yield a name, its signature and the first line of its docstring, each signature once."""
    seen = set()
    for name in sorted(sys.stdlib_module_names - set(NOT_IMPORTED)):
        if name.startswith("_"):
            continue
        try:
            module = importlib.import_module(name)
        except Exception:  # a module for another system
            continue
        for path, thing in _members(name, module):
            try:
                signature = f"{path}{inspect.signature(thing)}"
            except (ValueError, TypeError):
                continue
            summary = (inspect.getdoc(thing) or "").strip().split("\n")[0].strip()
            if summary and " at 0x" not in signature and signature not in seen:
                seen.add(signature)
                yield path, signature, summary


def _members(name: str, module: object) -> Iterator[tuple[str, object]]:
    for attribute, thing in sorted(vars(module).items()):
        if attribute.startswith("_") or getattr(thing, "__module__", None) != name:
            continue
        yield f"{name}.{attribute}", thing
        if inspect.isclass(thing):
            for method, function in sorted(vars(thing).items()):
                if not method.startswith("_") and callable(function):
                    yield f"{name}.{attribute}.{method}", function


def make(folder: Path) -> None:
    """Write train.jsonl and test.jsonl; the same Python always writes the same files."""
    warnings.simplefilter("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[str]] = {"train": [], "test": []}
    for path, signature, summary in questions():
        is_test = int(hashlib.sha256(path.encode()).hexdigest(), 16) % TEST_SHARE == 0
        line = json.dumps({"input": f"def {signature}:", "output": summary})
        parts["test" if is_test else "train"].append(line)
    for part, lines in parts.items():
        (folder / f"{part}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        print(f"{folder / part}.jsonl: {len(lines)} examples")


@torch.no_grad()
def score(run: Path, file: Path, limit: int) -> None:
    """Print the loss of the answers in a file, and how many of them the model gives."""
    reader = Reader(find_checkpoint(run, print))
    model = load_model(reader, torch.float32, torch.device("cpu"))
    spec = DataSpec(
        prefix=None,
        cache_dir=None,
        splits=(),
        seq_length=model.spec.max_position_embeddings,
        tokenizer=TokenizerSpec(library="builtin", vocab_size=0),
        seed=0,
        reset_position_ids=True,
        reset_attention_mask=True,
        instructions=InstructionSpec(
            train_files=(str(file),),
            validation_files=(str(file),),
            model=str(run),
            truncation_field="input",
        ),
    )
    data = open_data(spec, print)
    total, count = 0.0, 0
    for batch in validation_batches(data.validation, 4, 0, 1, rules=data.rules):
        arrays = (batch.tokens_BS, batch.targets_BS, batch.position_ids_BS, batch.cu_seqlens_N1)
        tokens, targets, positions, borders = (torch.from_numpy(a) for a in arrays)
        total += float(model(tokens, targets, position_ids_BS=positions, cu_seqlens_N1=borders))
        count += batch.num_targets
    print(f"loss {total / count:.4f} nats per token of an answer, over {count} tokens")

    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines, exact = lines[:: max(1, len(lines) // limit)][:limit], 0
    tokenizer = data.tokenizer
    room = model.spec.max_position_embeddings - LONGEST_ANSWER
    for number, line in enumerate(lines):
        prompt = tokenizer.encode(line["input"])[-room:]
        drawn: list[int] = []
        for token in generate(
            model, prompt, LONGEST_ANSWER, Sampling(), vocab_size=tokenizer.vocab_size
        ):
            if token == tokenizer.eod_id:
                break
            drawn.append(token)
        answer = continuation(tokenizer, prompt, drawn).strip()
        exact += answer == line["output"]
        if number < 5:
            print(
                f"  {line['input'][:70]}\n    answer:   {line['output']}\n    model:    {answer!r}"
            )
    print(f"exact match {exact} of {len(lines)} ({exact / len(lines):.1%})")


def main() -> None:
    """Run the command `make` or `score`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="write train.jsonl and test.jsonl")
    making.add_argument("folder", type=Path)
    scoring = commands.add_parser("score", help="print loss and exact match of a run's model")
    scoring.add_argument("run", type=Path)
    scoring.add_argument("file", type=Path)
    scoring.add_argument("--limit", type=int, default=200, help="answers that are generated")
    given = parser.parse_args()
    if given.command == "make":
        make(given.folder)
    else:
        score(given.run, given.file, given.limit)


if __name__ == "__main__":
    main()
