"""Throughput of the preprocessing command beside `tokenizers.encode_batch` on the same documents.

The documents are lines of Python's own library, drawn at random, as one JSONL file. The library
gets them in memory, in batches, and only its call is timed, with as many threads as the command
has workers. The command does everything: it starts, reads JSON, encodes, writes and hashes. Both
take the same trained byte-level BPE. They alternate over parts of the text, since a machine's other
work comes and goes; processor seconds are given beside those of the clock.

    python benchmarks/data_preprocess.py --megabytes 200 --threads 2
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tokenizers

from megafp8.data.corpus import builtin_documents
from megafp8.data.tokenize import train_tokenizer

BATCH = 1000

BASELINE = """
import json, sys, time
import tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
with open(sys.argv[2], encoding="utf-8") as file:
    texts = [json.loads(line)["text"] for line in file]
tokenizer.encode_batch(texts[:10], add_special_tokens=False)
wall, cpu = time.perf_counter(), time.process_time()
for first in range(0, len(texts), int(sys.argv[3])):
    tokenizer.encode_batch(texts[first : first + int(sys.argv[3])], add_special_tokens=False)
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))
"""


def write_part(path: Path, lines: list[str], megabytes: float, seed: int) -> int:
    """Documents of 20 to 400 lines; returns the bytes of their text."""
    rng, done = random.Random(seed), 0
    with open(path, "w", encoding="utf-8") as file:
        while done < megabytes * 1e6:
            text = "".join(rng.choices(lines, k=rng.randint(20, 400)))
            file.write(json.dumps({"text": text}) + "\n")
            done += len(text.encode())
    return done


def library(words: Path, part: Path, threads: int) -> list[float]:
    """Seconds of the clock and of the processors."""
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads)}
    argv = [sys.executable, "-c", BASELINE, str(words), str(part), str(BATCH)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=environment)
    found: list[float] = json.loads(done.stdout)
    return found


def command(words: Path, part: Path, output: Path, threads: int) -> list[float]:
    argv = [sys.executable, "-m", "megafp8.cli.preprocess", str(part), "--output", str(output)]
    argv += ["--tokenizer", str(words), "--workers", str(threads)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall = time.perf_counter() - wall
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return [wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=200.0)
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    texts = [document.text for document in builtin_documents()]
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    ours, theirs, num_bytes = [0.0, 0.0], [0.0, 0.0], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_tokenizer(texts, args.vocab_size).save(folder / "words.json")
        for number in range(args.parts):
            part = folder / f"part{number}.jsonl"
            num_bytes += write_part(part, lines, args.megabytes / args.parts, number)
            taken = library(folder / "words.json", part, args.threads)
            theirs = [a + b for a, b in zip(theirs, taken, strict=True)]
            taken = command(folder / "words.json", part, folder / f"d{number}", args.threads)
            ours = [a + b for a, b in zip(ours, taken, strict=True)]
            print(f"part {number}: library {theirs}, command {ours} s in all", flush=True)
    result = {
        "what": "preprocessing command beside tokenizers.encode_batch",
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "megabytes": num_bytes / 1e6,
        "threads": args.threads,
        "encode_batch_seconds": theirs[0],
        "encode_batch_cpu_seconds": theirs[1],
        "preprocess_seconds": ours[0],
        "preprocess_cpu_seconds": ours[1],
        "encode_batch_megabytes_per_second": num_bytes / 1e6 / theirs[0],
        "preprocess_megabytes_per_second": num_bytes / 1e6 / ours[0],
        "throughput_ratio": theirs[0] / ours[0],
        "versions": {"python": platform.python_version(), "tokenizers": tokenizers.__version__},
        "load_average": os.getloadavg(),
    }
    path = args.out / f"{result['date']}_data-preprocess_{args.threads}-threads.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
