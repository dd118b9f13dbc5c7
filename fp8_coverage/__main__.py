"""Run a script, and say which of its products ran in FP8.

fp8-coverage [--at-least 85%] [--json FILE] [--asked NAME] [--head NAME] SCRIPT [ARGUMENT ...]

The table goes to the standard error, after what the script prints. The exit code is that of the
script; 3 if the script ends well and less than was asked for ran in FP8, or it is not known.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path
from typing import Any

TOO_LITTLE = 3


def share_of(text: str) -> float:
    """Return the share that a text such as 85% or 0.85 means.

    Raises:
        argparse.ArgumentTypeError: The text is no share above 0 and up to 1.
    """
    number, percent = text.removesuffix("%"), text.endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text}: give a share such as 85% or 0.85")
    return share


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp8-coverage", description="Run a script, and say which of its products ran in FP8."
    )
    add = parser.add_argument
    add("--at-least", type=share_of, metavar="SHARE", help="fail below this share, such as 85%%")
    add("--json", type=Path, metavar="FILE", help="write all products to this new file")
    add("--asked", action="append", default=[], metavar="NAME", help="modules that are to run in "
        "FP8, with * for any text, besides those that are converted; may be repeated")  # fmt: skip
    add("--head", action="append", default=[], metavar="NAME", help="output layers, likewise")
    add("script", help="a file with Python")
    add("arguments", nargs=argparse.REMAINDER, help="what the script is given")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = _parser()
    asked = parser.parse_args(argv)
    if not Path(asked.script).is_file():
        parser.error(f"{asked.script}: there is no such file. Options come before the script")
    if asked.json is not None and (asked.json.exists() or not asked.json.parent.is_dir()):
        parser.error(f"--json {asked.json}: name a new file in a folder that is there")
    from fp8_coverage.record import coverage
    from fp8_coverage.table import CoverageError

    before = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [asked.script, *asked.arguments], str(Path(asked.script).parent)
    code: Any = 0
    try:
        with coverage(asked=asked.asked, head=asked.head) as found:
            runpy.run_path(asked.script, run_name="__main__")
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv, sys.path[0] = before
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    print(found.table(), file=sys.stderr)
    print(f"share of FP8: {found.share:.1%}", file=sys.stderr)
    if asked.json is not None:
        asked.json.write_text(json.dumps(found.to_dict(), indent=1) + "\n")
    if asked.at_least is not None and not code:
        try:
            found.assert_at_least(asked.at_least)
        except CoverageError as error:
            print(f"fp8-coverage: {error}", file=sys.stderr)
            return TOO_LITTLE
    return code or 0


if __name__ == "__main__":
    sys.exit(main())
