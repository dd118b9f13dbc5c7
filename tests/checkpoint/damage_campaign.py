"""Damage checkpoints by one flipped bit or a lost tail, and check that each damage is found.

    python -m tests.checkpoint.damage_campaign --damages 1000 --seed 1 [--runs 4] [--json FILE]

A file of the newest of two checkpoints of a real run is damaged, every file in turn. Then the
newest valid checkpoint is searched as at the start of a run: the damaged one must be named and set
aside, the older one must be used, and no tensor may be loaded from a file of the damaged one. With
`--runs N`, N runs continue from a damaged checkpoint and must end like an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import safetensors

from megafp8.checkpoint import reader
from megafp8.checkpoint.step_directories import step_name
from megafp8.parallel.mesh import single_rank
from megafp8.train.load import newest_after_cleanup
from tests.train.runs import STEPS, TWO_RANKS, Driver, Place, assert_same, make_dataset

STEPS_MADE = "trainer.max_steps=4"


def damage(path: Path, chance: random.Random) -> str:
    """Flip one bit of the file or shorten it; return a word for which of the two it was."""
    content = path.read_bytes()
    if chance.random() < 0.7:
        bit = chance.randrange(8 * len(content))
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        return "bit flipped"
    path.write_bytes(content[: chance.randrange(len(content))])
    return "truncated"


class Opened:
    """Record which files are opened for loading."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def __call__(self, path: str, **options: Any) -> Any:
        self.paths.append(path)
        return safetensors.safe_open(path, **options)


def try_one(source: Path, place: Path, number: int, chance: random.Random) -> tuple[str, str]:
    """Damage a copy of the run's checkpoints once; return the kind of damage and the file."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source, place)
    newest, before = place / step_name(4), place / step_name(2)
    files = sorted(newest.iterdir())
    path = files[number % len(files)]
    kind = damage(path, chance)
    messages: list[str] = []
    opened = Opened()
    reader.safe_open = opened  # type: ignore[attr-defined]
    found = newest_after_cleanup(place, single_rank(), messages.append)
    assert found == before, (number, path.name, kind, found)
    assert len(messages) == 1 and str(newest) in messages[0] and before.name in messages[0], (
        messages
    )
    assert (place / f"{newest.name}.damaged-1").is_dir() and not newest.exists()
    loaded = reader.Reader(found)
    loaded.read(loaded.names()[number % len(loaded.names())])
    assert opened.paths and not [p for p in opened.paths if newest.name in p]
    return kind, path.name


def try_run(reference: Place, place: Place, file: int, chance: random.Random) -> None:
    """Stop a run, damage its newest checkpoint, and continue the run to its end."""
    done = place.run(fault=["signalled", 15, 6])
    assert done.code == 75, done.output
    files = sorted(place.checkpoint(6).iterdir())
    damage(files[file % len(files)], chance)
    done = place.run()
    assert done.code == 0 and "damaged checkpoint" in done.output, done.output
    assert_same(place, reference)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--damages", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    chance, began = random.Random(given.seed), time.monotonic()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="damages-") as folder:
        driver = Driver()
        try:
            data = make_dataset(Path(folder, "tiny"))
            places = [Place(driver, data, Path(folder, str(n))) for n in range(given.runs + 2)]
            for place in places:
                place.cwd.mkdir()
            done = places[0].run(*TWO_RANKS, STEPS_MADE)
            assert done.code == 0 and places[0].steps() == [2, 4], done.output
            source = places[0].dir() / "checkpoints"
            for number in range(given.damages):
                kind, file = try_one(source, Path(folder, "copy"), number, chance)
                counts[f"{file}, {kind}"] += 1
            if given.runs:
                assert places[1].run().code == 0 and places[1].steps()[-1] == STEPS
                for number, place in enumerate(places[2:]):
                    try_run(places[1], place, number, chance)
        finally:
            driver.close()
    report = {
        "seed": given.seed,
        "damages": sum(counts.values()),
        "runs": given.runs,
        "seconds": round(time.monotonic() - began),
        "by file": dict(sorted(counts.items())),
    }
    print(json.dumps(report, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{given.damages} damages: all found, the checkpoint before used, none opened")


if __name__ == "__main__":
    main()
