"""Compare the throughput of the preprocessing command with that of `tokenizers.encode_batch`.

Both encode the same documents, which are random lines of Python's own library in one JSONL file.
`encode_batch` gets them in memory, in batches, and only its calls are timed; it has as many threads
as the command has workers. The command does everything: it starts, reads JSON, encodes, writes and
hashes. Both use the same trained byte-level BPE. They run in turns of a few seconds, one stopped
while the other runs, and only their own turns count, so that other programs on the machine affect
both equally. The result has processor seconds and wall seconds.

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
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import tokenizers

from megafp8.data.builtin import builtin_documents
from megafp8.data.tokenize import train_tokenizer

BATCH = 1000

LIBRARY = """
import json, sys
import tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
with open(sys.argv[2], encoding="utf-8") as file:
    texts = [json.loads(line)["text"] for line in file]
tokenizer.encode_batch(texts[:10], add_special_tokens=False)
print("ready", flush=True)
sys.stdin.readline()
for first in range(0, len(texts), int(sys.argv[3])):
    tokenizer.encode_batch(texts[first : first + int(sys.argv[3])], add_special_tokens=False)
"""


@dataclass
class Contender:
    """Hold a process with its children, in a group of its own, and the seconds of its turns."""

    process: subprocess.Popen[str]
    cpu_before: float = 0.0  # CPU seconds before the first turn
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def runs(self) -> bool:
        """Whether the process has not ended."""
        return self.process.returncode is None

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children."""
        os.killpg(self.process.pid, number)

    def turn(self, seconds: float) -> None:
        """Let the process run for `seconds`, or to its end, and count the time."""
        began, before = time.perf_counter(), children_seconds()
        self.signal(signal.SIGCONT)
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGSTOP)
        self.seconds += time.perf_counter() - began
        if not self.runs:
            if self.process.returncode:
                raise SystemExit(f"{self.process.args} ended with {self.process.returncode}")
            self.cpu_seconds = children_seconds() - before - self.cpu_before


def children_seconds() -> float:
    """Return the processor seconds of all children that have ended, and of their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_part(path: Path, lines: list[str], megabytes: float, seed: int) -> int:
    """Write documents of 20 to 400 random lines; return the bytes of their text."""
    rng, done = random.Random(seed), 0
    with open(path, "w", encoding="utf-8") as file:
        while done < megabytes * 1e6:
            text = "".join(rng.choices(lines, k=rng.randint(20, 400)))
            file.write(json.dumps({"text": text}) + "\n")
            done += len(text.encode())
    return done


def library(words: Path, part: Path, threads: int) -> Contender:
    """Has its documents in memory, and waits for its first turn."""
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads)}
    argv = [sys.executable, "-c", LIBRARY, str(words), str(part), str(BATCH)]
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    used = psutil.Process(process.pid).cpu_times()
    contender = Contender(process, used.user + used.system)
    contender.signal(signal.SIGSTOP)
    process.stdin.write("go\n")
    process.stdin.flush()
    return contender


def command(words: Path, part: Path, output: Path, threads: int) -> Contender:
    """Return the preprocessing command, stopped at its beginning."""
    argv = [sys.executable, "-m", "megafp8", "preprocess", str(part), "--output", str(output)]
    argv += ["--tokenizer", str(words), "--workers", str(threads)]
    process = subprocess.Popen(
        argv,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    contender = Contender(process)
    contender.signal(signal.SIGSTOP)
    return contender


def main() -> None:
    """Run both in turns, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=200.0)
    parser.add_argument("--turn", type=float, default=3.0, help="seconds of a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    texts = [document.text for document in builtin_documents()]
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_tokenizer(texts, args.vocab_size).save(folder / "words.json")
        part = folder / "part.jsonl"
        num_bytes = write_part(part, lines, args.megabytes, seed=0)
        del texts, lines
        theirs = library(folder / "words.json", part, args.threads)
        ours = command(folder / "words.json", part, folder / "d", args.threads)
        try:
            while theirs.runs or ours.runs:
                for contender in (theirs, ours):
                    if contender.runs:
                        contender.turn(args.turn)
                print(f"library {theirs.seconds:.1f} s, command {ours.seconds:.1f} s", flush=True)
        finally:
            for contender in (theirs, ours):
                if contender.runs:
                    contender.signal(signal.SIGKILL)
    result = {
        "what": "preprocessing command compared with tokenizers.encode_batch",
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "megabytes": num_bytes / 1e6,
        "threads": args.threads,
        "turn_seconds": args.turn,
        "encode_batch_seconds": theirs.seconds,
        "encode_batch_cpu_seconds": theirs.cpu_seconds,
        "preprocess_seconds": ours.seconds,
        "preprocess_cpu_seconds": ours.cpu_seconds,
        "encode_batch_megabytes_per_second": num_bytes / 1e6 / theirs.seconds,
        "preprocess_megabytes_per_second": num_bytes / 1e6 / ours.seconds,
        "throughput_ratio": theirs.seconds / ours.seconds,
        "cpu_throughput_ratio": theirs.cpu_seconds / ours.cpu_seconds,
        "versions": {"python": platform.python_version(), "tokenizers": tokenizers.__version__},
        "load_average": os.getloadavg(),
    }
    path = args.out / f"{result['date']}_data-preprocess_{args.threads}-threads.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
