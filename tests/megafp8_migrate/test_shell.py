"""Test that a script's commands are read as bash would run them, and that nothing is run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.config.errors import SettingError
from megafp8_migrate import megatron, shell, shell_words
from megafp8_migrate.shell import read_script

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


BESIDE = 'N=7\nARGS=(--beside "$1")\n'
KNOWN = [
    ("case $1 in a|b*) A=1;; *) A=2;; esac\nrun $A", ["bc"]),
    ("case $1 in 'a b') A=1;; \"x\") A=2;; ?) A=3;; esac\nrun $A.", ["y"]),
    ("case $1 in a) run 1;; b) run 2;; esac\nrun 3", ["c"]),
    ("A=/x/b.tar.gz\nrun ${A%.gz} ${A%%.*} ${A##*/} ${A#/x}", []),
    ("A=(a bc d)\nrun ${#A[@]} ${#A} ${A[-1]} ${A[1]%c} ${A[$((1+1))]}", []),
    ("A=abc\nrun ${#A} ${A%x*} ${A#?}", []),
    ("set -- --a 1 'b c'\nrun $# \"$@\" $3", []),
    ("shift\nrun $1 $#\nshift 2\nrun $1", ["1", "2", "3", "4"]),
    ("f() { local A=2; B=3; run $A $1; return; run no; }\nA=1\nf x\nrun $A $B", []),
    ("f() { run $#; g() { run $1; }; g in; }\nf 1 2", []),
    ("A=1\n(A=2; run $A)\nA=3 | cat\nrun $A", []),
    ("source common.sh\nrun $N", []),
    (". ./common.sh two\nrun ${ARGS[@]}", []),
    ("if [ $1 = x ]; then run 1; exit 0; fi\nrun 2", ["x"]),
    ("A=1; [ $A = 1 ] && { run 1; exit; }\nrun 2", []),
    ("exec run 1 2", []),
    ("A=a\\ b\nrun \"$A\" 'it'\"'\"'s' \"say \\\"x\\\"\" \\$A", []),
    ("A=(\n --a 1 # one\n # --b\n --c\n)\nrun ${A[@]}", []),
    ("[[ $1 == *.sh && $1 != a* ]] && run yes\nrun ${1%.sh}", ["b.sh"]),
    ("A=x; A+=y; A+=' z'\nrun $A \"$A\"", []),
    ("eval 'A=5; B=(1 2)'\nrun $A ${B[1]}", []),
    ("A=2\nrun $(( ($A > 1) ? 7 : 0 )) $((A == 3 ? 1 : A * 4)) $((A >= 2)) $((A != 2))", []),
    ("A='--a 1'; B=b\nX=\"${A} ${B}\"\nrun $X \"$A $B $((1 + 2))\"", []),
    ("A='--a 1'; B=b\nX=\"go\n ${A} ${B} \\\n  $B\t${B} \\$B\"\neval run $X", []),
    ("A='--a 1'; B=b\nrun ${C:-$A ${B}} \"${C:-$A ${B}}\"", []),
    ("cat <<'EOF' > /dev/null\nrun no\nEOF\nrun yes", []),
    ("A=1 B=2\nrun $A$B ${A}_${B}", []),
    ("run --a 1 \\\n  --b \\\n", []),
    ("case $1 in ab) A=1;; *bc) A=2;; esac\nrun $A", ["abc"]),
    ("if test -f nothing; then exit 1; fi\nrun 1", []),
    ("echo usage: run --a > /dev/null\necho 'or run --b' > /dev/null\nrun --c", []),
]  # fmt: skip
"""Odd scripts of which everything is known."""
OPEN = [
    ("A=2\nrun $((A > 1 ? A > 5 ? 1 : 2 : 3)) $((1 < A < 3)) $((A = 5)) $A $((!A))", []),
    ("A=2\nrun $((B ? A : 3)) $((A<<2)) $((A ? B : 1)) $(((A ? 1 : 0) + 1))", []),
    ("A=2\nrun $((3 > 2 == 1)) $((1 + (A ? 1 : 0))) $((A ? 1 : (0) + 1))", []),
    ("A=abc\nrun ${A/b/c} ${A//a/e} ${A:1} ${A:1:2} ${A^^} ${A,,}", []),
    ("set -- 1 2 3\nrun ${@:2}", []),
    ("A[0]=x\nA[1]='y z'\nrun \"${A[@]}\"", []),
    ("A=(1 2 3)\nA[1]=9\nrun ${A[@]}", []),
    ("run --a 1 \\ \n  --c 3 2>/dev/null || true", []),
    ("run --a 1 \\\n  # --b 2 \\\n  --c 3 2>/dev/null || true", []),
    ("N=4\n((N++))\nrun $N", []),
    ("N=4\nlet N=N+1\nrun $N", []),
    ("N=4\nA=$((N++))\nrun $N", []),
    ("N=4; printf -v N %d 5; run $N", []),
    ("for ((i = 0; i < 3; i++)); do A=$i; done\nrun $A $i", []),
    ("while [ $# -gt 0 ]; do case $1 in --tp) TP=$2; shift 2;; *) shift;; esac; done\nrun $TP $1",
     ["--tp", "2"]),
    ("A=1\nfor x in 1 2; do A=$A$x; done\nrun $A", []),
    ("declare -i N=2*3\nrun $N", []),
    ("declare -A M=([a]=1 [b]=2)\nrun ${M[a]}", []),
    ("M=([1]=x [0]=y)\nrun ${M[0]}", []),
    ("IFS=,\nA=a,b\nrun $A", []),
    ("A=b\nB=A\nrun ${!B}", []),
    ("run /d/{a,b} {1..3}", []),
    ("run /bin/ca? /bi*/cat", []),
    ("A=x.y.z\nP='*.'\nrun ${A#$P} ${A//[xy]/q}", []),
    ("if true; then f() { run 1; }; else f() { run 2; }; fi\nf", []),
    ("X='A=5'\neval \"$X; B=$(echo 2)\"\nrun $A $B", []),
    ("case $1 in [ab]) A=1;; *) A=2;; esac\nrun $A", ["a"]),
    ("case a in a) A=1;& b) B=2;; esac\nrun $A$B", []),
    ("A=(1 2)\nunset 'A[0]'\nrun ${A[@]}", []),
    ("set -- $(echo 1 2) 3\nrun $2", []),
    ("A=$(printf '1 2')\nB=($A 3)\nrun ${B[1]}", []),
    ("source missing.sh || true\nrun ${N:-3}", []),
    ("A=1\nreadarray -t A < <(printf '2\\n')\nrun $A", []),
    ("f() { shift; }\nf 1 2\nset 5 6\nrun $1 $(( $# + 1 ))", []),
    ("A=5 eval 'run $A'", []),
    ("A=1\ntrue && A=2 || A=3\nrun $A", []),
    ("A=1\nif ! false; then A=2; fi\nrun $A", []),
    ("A=$'x\\ty'\nrun \"$A\"", []),
    ("A='a b'\nB=(\"${A[@]/a/c}\")\nrun \"${B[@]}\"", []),
    ("alias run2=run\nA=~/x\nrun $A", []),
    ("trap 'run 9' EXIT\nrun 1\ntrap - EXIT", []),
    ("A=08\nrun $((10#$A + 1)) $((1 << 3)) $((2 ** 3))", []),
    ("A=1\n{ A=2; } &\nwait\nrun $A", []),
    ("A=1\necho 2 | while read x; do A=$x; done\nrun $A", []),
    ("local_f() { typeset A=2; }\nA=1\nlocal_f\nrun $A", []),
    ("A=1\nA= run $A x\nrun \"$A\"", []),
    ("A=(x)\nA+=(y)\nA+=z\nrun \"${A[@]}\"", []),
    ("until A=2; do :; done\nrun $A", []),
    ("A=\"1\n2\"\nrun $A", []),
    ("N=0\nrun ${N:+yes} ${M+no} ${N:-4} x", []),
]  # fmt: skip
"""Odd scripts of which something may stay open, and nothing may be wrong."""


def reading(text: str, arguments: list[str]) -> tuple[list[str], bool]:
    """Return the words of the commands `run`, and whether anything is said to be open."""
    files = {"common.sh": BESIDE}
    script = read_script(text, arguments, beside=files.get)
    commands = [c for c in script.commands if "run" in c.words]
    words = [word for c in commands for word in c.words[c.words.index("run") + 1 :]]
    is_open = bool(script.unread or any(c.condition for c in commands))
    return words, is_open or bool(script.holes.inside(" ".join(words)))


@pytest.mark.parametrize(("text", "arguments"), [*KNOWN, *OPEN])
def test_no_odd_script_gives_a_wrong_word(
    text: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "common.sh").write_text(BESIDE)
    monkeypatch.chdir(tmp_path)
    words, is_open = reading(text, arguments)
    true = by_bash(text.replace("exec run", "run"), *arguments)
    assert is_open or [word for word in true if word] == words
    assert not (is_open and (text, arguments) in KNOWN)
    crlf, _ = reading(text.replace("\n", "\r\n"), arguments)
    assert "\r" not in "".join(crlf)


def test_another_script_beside_is_read_and_said(tmp_path: Path) -> None:
    for place in ("common.sh", "./common.sh", '"$(dirname "$0")/common.sh"',
                  '"$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"/common.sh'):  # fmt: skip
        script = read_script(f"D=x\nsource {place}\nrun $N", beside={"common.sh": BESIDE}.get)
        assert script.commands[-1].words == ("run", "7")
        assert script.assumed["source common.sh (line 2)"] == "is the file beside the script"
    for place in ("../common.sh", "/etc/profile", "$HOME/common.sh",
                  '"$(dirname "$0")/../common.sh"', "other.sh"):  # fmt: skip
        script = read_script(f"source {place}\nrun $N", beside={"common.sh": BESIDE}.get)
        assert script.unread and script.holes.inside(script.commands[-1].words[1])
    script = read_script("source a.sh", beside={"a.sh": "if [ -f x ]; then run; fi\n)("}.get)
    assert script.unread == ["line 1 of a.sh"]


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
        ("if [ -f x ]; then A=1; fi\nrun $A", "the condition [ -f x ] of line 1"),
        ("[ -f x ] && A=1\nrun $A", "the condition [ -f x ] of line 1"),
        (
            f"if [[ -z $B || {'-n $C || ' * 9} -f x ]]; then A=1; fi\nrun $A",
            "the condition of line 1",
        ),
        ("case $X in a) A=1;; b) A=2;; esac\nrun $A", "the condition of line 1"),
        ("for A in 1 2; do run $A; done", "the loop of line 1"),
        ("A=1\nwhile read x; do A=2; done\nrun $A", "the condition of line 2"),
        ("read A\nrun $A", "line 1 (read A)"),
        ("A=abc\nrun ${A%$X}", "${A%$X}"),
        ("A=x\nA[$K]=y\nrun ${A[1]}", "an element of A that is set"),
        ("A=($X a b)\nrun ${A[1]}", "${A[1]}"),
        ("f() { run $2; }\nf $X 4", "$2"),
        ("run /data/*.bin", "/data/*.bin"),
        ("declare -A A=([x]=1)\nrun ${A[x]}", "A, which is declared"),
        ("if test -f y; then shift; fi\nrun $1", "the condition of line 1"),
        ("set -- 1 2\nif test -f y; then shift; fi\nrun $1", "the condition of line 2"),
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
    condition = "if [ $A = 4 ]; then B=0; elif [ $A = 5 ]; then B=1; else B=2; fi"
    script = read_script(f"A=${{A:-5}}\n{condition}\nsource more.sh\nrun )(\n")
    assert script.assumed["A"] == "has the script's default, 5"
    assert script.assumed["condition [ $A = 4 ] (line 2)"] == "is false"
    assert script.assumed["condition [ $A = 5 ] (line 2)"] == "is true"
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
        "A=a\n" + "A=$A$A\n" * 17 + "case $A in *a*a*a*a*a*b) run;; esac\nrun ${A%*a*b}",
        "run " + "/" * 200_000 + " {" + "," * 200_000,
        "run /" + "train" * 40_000,
    ],
)
def test_scripts_without_end_end(text: str) -> None:
    try:
        megatron.training_commands(read_script(text))
    except SettingError as error:
        assert "too" in error.reason or "starts no program" in error.reason


MANY = '"$@" ' * 8
GROWING = {
    "set": ["set -- a b c", *[f"set -- {MANY}"] * 7, "run --x"],
    "set without --": ["set a b c", *[f"set {MANY}"] * 7, "run --x"],
    "arguments of a function": [f"f() {{ run $#; f {MANY}; }}", "f a"],
    "arrays": ["A=(a b)", *['A=("${A[@]}" "${A[@]}" "${A[@]}")'] * 20, "run ${A[@]}"],
    "+= of arrays": ["A=(a b)", *['A+=("${A[@]}" "${A[@]}")'] * 20, "run ${A[@]}"],
    "eval": ["set -- a b", *['eval \'set -- "$@" "$@" "$@"\''] * 20, "run"],
    "words that are scripts": ['V=\'x "$V --" "$V --" \'' + "a" * 99_999, 'run "$V --"'],
    "here-documents": ["A=aaaaaaaa", *["A=$A$A"] * 14, "sbatch <<E", *["run $A"] * 300, "E"],
    "printf -v": ["A=aaaaaaaa", *["A=$A$A"] * 14, *["printf -v B %s $A $A $A"] * 2000],
    "patterns": ["A=" + "a" * 4000, *["run ${A%b*}"] * 3000],
    "one argument of many": ["set -- " + "a " * 9000, *["run $8999"] * 4000],
    "a number of many": ["A=(" + "a " * 9000 + ")", *["run ${#A[@]}"] * 4000],
    "copies of variables": [*(f"A{n}={n}" for n in range(6000)), *["run"] * 3000],
    "branches": [*(f"A{n}={n}" for n in range(5000)), *["if [ -f x ]; then B=1; fi"] * 1500],
    "sources": ["source self.sh; source self.sh # " + "a" * 99_999],
}
"""Lines of scripts that stand for more than can be read, by what grows."""


@pytest.mark.parametrize("kind", GROWING)
def test_what_grows_has_an_end_and_the_message_names_the_line(kind: str) -> None:
    text = "\n".join(GROWING[kind])
    with pytest.raises(SettingError, match=r"too m.*\(line \d+( of self.sh)?\)"):
        read_script(text, beside={"self.sh": text}.get)


def test_a_text_on_which_the_parser_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time grows with the square of some damaged texts, and so does its memory."""
    text = "A=(\n" * 300
    read_script(text)
    monkeypatch.setattr(shell, "_PARSE_SECONDS", 0.0)
    with pytest.raises(SettingError, match=r"too damaged to be parsed \(line 1\)"):
        read_script(text)


PARTS = [
    "set -- ", "set ", '"$@" ', "$@ ", "$1 ", "a ", "'b c' ", "$A ", '"$A" ', "A=$A", "A+=$A",
    'A=("${A[@]}" $A)', "A+=(${A[@]} $@)", "f ", "f() { ", "} ", "eval ", 'eval "$A" ',
    'bash -c "$A" ', "run ", "--x ", "; ", "\n", "printf -v A %s$A ", "cat <<E\n", "\nE\n",
    "sbatch <<E\n", "for i in $@; do ", "done ", "while x; do ", "if [ -f x ]; then ", "fi ",
    "case $A in *a*) ", ";; esac ", "let A=A+1 ", "${A%a*} ", "${A:-$A$A} ", "$((A + 1)) ",
    "shift ", "source self.sh ", "( ", ") ", "& ", "| ", "' ", '" ', "local A=$A ", "export A ",
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PARTS), st.integers(1, 12)), max_size=30))
def test_a_random_script_ends(parts: list[tuple[str, int]]) -> None:
    """What it stands for is bounded, however often each of its parts is repeated."""
    text = "".join(part * count for part, count in parts)
    try:
        script = read_script(text, ["a", "b c"], beside={"self.sh": text}.get)
    except SettingError:
        return
    words = [word for command in script.commands for word in command.words]
    assert sum(map(len, words)) <= shell_words.MAX_SPENT
    assert all(len(script.holes.shown(word)) <= max(len(word), 3000) for word in words)


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
