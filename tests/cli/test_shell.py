"""Test that a script's commands are read as bash would run them, and that nothing is run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.cli.migrate.shell import read_script
from megafp8.config.errors import SettingError

pytest.importorskip("tree_sitter_bash", reason="needs tree-sitter-bash, which reads scripts")

SCRIPT = """\
#!/bin/bash
# a comment with "quotes
N=4; export TP=${TP:-2}
PP=$((N * 2 / TP - 1))
NAME='one two'
ARGS=(
    --layers $N          # four of them
    --name "$NAME" \\
    # --none 1
    --split 'a b'
    "--words x y"
)
ARGS+=(--tp "${TP}" --pp ${PP})
MORE="--a 1 \\
  --b 2"
MORE+=" --c ${UNSET:-3}"
if [[ $TP == 2 && -n "$N" ]]; then ARGS+=(--yes); else ARGS+=(--no); fi
if [ $N -gt 7 ]; then MORE+=" --big"; elif [ "$N" = 4 ]; then MORE+=" --four"; fi
[ -z "$N" ] && MORE+=" --empty"
[[ "$NAME" != x ]] && MORE+=" --named"
extra() { OUT="--of-$1"; }
extra four
run --first ${ARGS[@]} $MORE "${ARGS[3]}" "$OUT" \\
    --path=$NAME/"x$N"y --last
"""


def words_of(text: str, *arguments: str, name: str = "run") -> list[list[str]]:
    script = read_script(text, arguments)
    found = [c.words for c in script.commands if c.words[0] == name]
    return [[script.holes.shown(word) for word in words[1:]] for words in found]


def by_bash(text: str, *arguments: str) -> list[str]:
    """Return the arguments of the command `run`, as bash itself passes them."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash to compare with")
    text = 'run() { printf "%s\\0" "$@"; }\n' + text
    done = subprocess.run(
        [bash, "-c", text, "script", *arguments], capture_output=True, text=True, check=True,
        env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (SCRIPT, []),
        ("A=${1:-x}; B=${2:-MOCK}\nrun $A $B ${3+there} \"$1\"", ["given"]),
        ('A="b c"\nrun $A "$A" \'$A\' x"$A"y', []),
        ("run --split '99,1,0' \"--n 5\" \\\n  --end", []),
        ("A=(1 2)\nA+=(3)\nrun ${A[@]} ${A[1]} $A", []),
        ('A=("x y" z)\nrun "${A[@]}" ${A[@]}', []),
        ('A=("x y" z)\nrun "${A[*]}" ${A[*]} "$*" "$@"', ["p q", "r"]),
        ("f() { run $1 --in $2; }\nf a b", []),
        ("X=1\n{ X=2; }\nrun $((X + 3)) $((7 % 4)) $((-7 / 2))", []),
        ("X=3\nX=1 run $X\nX=5 Y=6\nrun ${X} $Y", []),
        ("T=1\nif [ $T = 1 ]\nthen\n  A=yes\nfi\nrun $A", []),
        ("A=x\ncat > /dev/null <<EOF\nA=y\nEOF\nrun $A", []),
        ('OPTS="--a 1"\nOPTS="$OPTS --b 2"\nrun ${OPTS} "$OPTS"', []),
        ("DIR=/x; NAME=y\nrun ${DIR}/${NAME}_z $DIR'/'$NAME", []),
        ("eval \"run --a 1\"", []),
    ],
)  # fmt: skip
def test_words_are_those_of_bash(text: str, arguments: list[str]) -> None:
    read = [word for words in words_of(text, *arguments) for word in words]
    assert [word for word in by_bash(text, *arguments) if word] == read


def test_nothing_is_run(tmp_path: Path) -> None:
    file = tmp_path / "touched"
    text = f"A=$(touch {file})\ntouch {file}\nrun $A `touch {file}` <(touch {file})\n"
    ((first, *_),) = words_of(text)
    assert first == f"$(touch {file})" and not file.exists()


@pytest.mark.parametrize(
    ("text", "hole"),
    [
        ("run $1", "$1"),
        ("run $HOME", "$HOME"),
        ("A=$(hostname)\nrun $A", "$(hostname)"),
        ("if [ -f x ]; then A=1; fi\nrun $A", "the condition of line 1"),
        ("[ -f x ] && A=1\nrun $A", "the condition of line 1"),
        ("case $X in a) A=1;; b) A=2;; esac\nrun $A", "the condition of line 1"),
        ("for A in 1 2; do run $A; done", "the loop of line 1"),
        ("A=1\nwhile read x; do A=2; done\nrun $A", "the condition of line 2"),
        ("read A\nrun $A", "line 1 (read A)"),
        ("A=abc\nrun ${A%c}", "${A%c}"),
        ("A=x\nA[1]=y\nrun ${A[1]}", "an element of A that is set"),
        ("run $((X + 1))", "$((X + 1))"),
    ],
)
def test_what_is_not_known_is_a_hole(text: str, hole: str) -> None:
    script = read_script(text)
    command = next(c for c in script.commands if c.words[0] == "run")
    assert script.holes.inside(" ".join(command.words[1:]))[0] == hole


def test_arrays_keep_what_all_branches_share() -> None:
    text = "A=(--x 1)\nif test -f y; then A+=(--y); fi\nrun ${A[@]}"
    assert words_of(text) == [["--x", "1", "the condition of line 2"]]


def test_a_command_that_may_not_run_says_so() -> None:
    commands = read_script("if test -f y; then run --a; fi\nrun --b").commands
    found = [c.condition for c in commands if c.words[0] == "run"]
    assert found == ["the condition of line 1", ""]


def test_what_stands_inside_of_a_launchers_quotes_is_read() -> None:
    text = "N=3\nsrun -l bash -c \"cd x; run --layers $N --y\""  # fmt: skip
    assert words_of(text) == [["--layers", "3", "--y"]]


def test_assumptions_and_unread_parts_are_told() -> None:
    script = read_script("A=${A:-5}\nif [ $A = 5 ]; then B=1; fi\nsource more.sh\nrun )(\n")
    assert script.assumed["A"] == "has the script's default, 5"
    assert "is true" in script.assumed["condition [ $A = 5 ] (line 2)"]
    assert any("line 3" in where for where in script.unread)
    assert "line 4" in script.unread


def test_without_the_parser_the_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tree_sitter_bash", None)
    with pytest.raises(SettingError, match="pip install tree-sitter tree-sitter-bash"):
        read_script("run")


@pytest.mark.parametrize(
    "text",
    [
        "f() { f; f; }\nf",
        "$(" * 3000,
        "if true; then " * 400,
        "A=x\n" + "A=$A$A\n" * 60 + "run $A",
        "((((" * 500 + "))))" * 500,
        "run " + "${A:-" * 400,
    ],
)
def test_scripts_without_end_end(text: str) -> None:
    try:
        read_script(text)
    except SettingError as error:
        assert "too" in error.reason


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_scripts_give_no_traceback(data: st.DataObject) -> None:
    text = SCRIPT
    for _ in range(data.draw(st.integers(1, 6))):
        start = data.draw(st.integers(0, len(text)))
        end = start + data.draw(st.integers(0, 12))
        piece = data.draw(
            st.sampled_from(["", "\0", "(", ")", "${", "}", '"', "'", "$((", "<<E", "`", "\\",
                             "fi", "do\n", ";;", "[[", "\ue0005\ue001", "é", "$", "=("])
        )  # fmt: skip
        text = text[:start] + piece + text[end:]
    try:
        script = read_script(text)
    except SettingError:
        return
    assert all(isinstance(w, str) for command in script.commands for w in command.words)
