"""The console in a file, on a pseudo-terminal, and after its reader has closed the pipe."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megafp8.observe.console import Console, PlainConsole, SilentConsole, StepReport, Validation
from megafp8.observe.live import LiveConsole, open_console
from tests.limits import HANG_SECONDS

ROOT = Path(__file__).parents[2]

REPORT = StepReport(
    step=50,
    loss=5.12341,
    grad_norm=0.87,
    lr=9.8e-4,
    step_seconds=0.365,
    tokens_per_second=21300.0,
    tflops_causal=0.51,
    tflops_full=0.55,
    mfu_causal=0.4123,
    mfu_full=0.4446,
    hfu_causal=0.4123,
    hfu_full=0.4446,
    memory_bytes=1288490188,
    data_wait_fraction=0.001,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_plain_line_explains_itself() -> None:
    stream = io.StringIO()
    console = open_console(stream=stream)
    console.start(600)
    console.step(REPORT)
    assert stream.getvalue() == (
        "step  50/600 | loss 5.1234 | grad norm 0.87 | lr 9.8e-04 | 21.3k tok/s"
        " | MFU 41.2 % | mem 1.2 GiB | ETA 3:21\n"
    )
    console.step(dataclasses.replace(REPORT, shows_utilization=False, health="FP8 ok"))
    assert "| lr 9.8e-04 | FP8 ok | 21.3k tok/s | mem 1.2 GiB | ETA" in stream.getvalue()


def test_what_is_recomputed_is_counted_apart() -> None:
    stream = io.StringIO()
    console = PlainConsole(stream)
    console.start(600)
    console.step(dataclasses.replace(REPORT, hfu_causal=0.55, hfu_full=0.6))
    assert "MFU 41.2 %, HFU 55.0 %" in stream.getvalue()


def test_plain_lines_of_everything_else() -> None:
    stream = io.StringIO()
    with PlainConsole(stream) as console:
        console.header(["a run", "of a model"])
        console.start(600, 40)
        console.validation(
            Validation(step=50, val_loss=5.3, perplexity=200.34, bits_per_byte=2.1, seconds=0.44)
        )
        console.validation(Validation(step=100, val_loss=math.nan))
        console.event("checkpoint saved: /x [bold]")
        console.warn("disk is full")
        console.finish([("loss", "1"), ("perplexity", "2.72")], ["bye"])
    assert stream.getvalue().splitlines() == [
        "a run",
        "of a model",
        "continuing after step 40 of 600",
        "step  50/600 | val loss 5.3000 | perplexity 200.34 | 2.100 bits/byte | validated in 0.4 s",
        "step 100/600 | val loss NaN",
        "checkpoint saved: /x [bold]",
        "warning: disk is full",
        "",
        "      loss  1",
        "perplexity  2.72",
        "bye",
    ]


def test_plain_lines_of_ordinary_values_align() -> None:
    stream = io.StringIO()
    console = PlainConsole(stream, clock=Clock())
    console.start(1000)
    for step, loss in ((5, 9.1), (50, 5.25), (500, 0.125)):
        console.step(dataclasses.replace(REPORT, step=step, loss=loss))
    starts = {
        tuple(match.start() for match in re.finditer(r"\|", line))
        for line in stream.getvalue().splitlines()
    }
    assert len(starts) == 1


def test_not_finite_numbers_and_notes_are_shown() -> None:
    stream = io.StringIO()
    console = PlainConsole(stream)
    console.start(600)
    console.step(
        dataclasses.replace(REPORT, loss=math.nan, grad_norm=math.inf, notes=("1 step skipped",))
    )
    line = stream.getvalue()
    assert "loss NaN" in line and "grad norm Infinity" in line
    assert line.endswith("| 1 step skipped\n")


def test_eta_follows_the_wall_clock_and_survives_a_rollback() -> None:
    stream, clock = io.StringIO(), Clock()
    console = PlainConsole(stream, clock=clock)
    console.start(100)
    for step, seconds in ((10, 0.0), (20, 50.0), (10, 3.0)):
        clock.now += seconds
        console.step(dataclasses.replace(REPORT, step=step, step_seconds=2.0))
    etas = re.findall(r"ETA (\S+)", stream.getvalue())
    # 90 steps of the 2 s reported, then 80 of the 5 s that passed with validations, then new ones.
    assert etas == ["3:00", "6:40", "3:00"]


def test_the_live_block_counts_steps_that_are_not_logged() -> None:
    clock = Clock()
    console = LiveConsole(Terminal(), clock=clock)

    def shown() -> str:
        with console._rich.capture() as capture:
            console._rich.print(console._block())
        return ESCAPE.sub("", capture.get())

    console.start(100)
    assert "step   0/100" in shown() and "no step is done yet" in shown()
    assert "0:00 elapsed, -:-- left" in shown()
    clock.now += 9.0  # the first step has costs that others do not have
    console.step(dataclasses.replace(REPORT, step=1, step_seconds=9.0))
    assert "loss 5.1234" in shown() and "0:09 elapsed, 14:51 left" in shown()
    assert "no step" not in shown() and not console.wants_progress
    clock.now += 4.0
    assert console.wants_progress
    losses = (9.0, 8.0, 7.0, 6.5)
    console.progress(dataclasses.replace(REPORT, step=3, loss=4.5, curve=losses))
    text = shown()
    assert "step   3/100" in text and "loss 4.5000 █▅▂▁" in text
    assert "0:13 elapsed, 3:14 left" in text  # 97 steps of the 2 s that the last two took
    console.validating(12, 40)
    assert "validating: 12 of 40 microbatches" in shown()
    console.validation(Validation(step=3, val_loss=4.2))
    assert "validating" not in shown() and "val loss 4.2000 at 3" in shown()
    console.answer("SIGINT: saving after this step (4); again to leave at once")
    assert "SIGINT: saving after this step (4); again to leave at once" in shown()
    console.close()
    again = LiveConsole(Terminal(), clock=clock)
    again.start(100, 40)
    with again._rich.capture() as capture:
        again._rich.print(again._block())
    assert "no further step is done yet" in capture.get()
    again.close()


def test_other_ranks_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    console = open_console(main_rank=False)
    assert isinstance(console, SilentConsole)
    use_everything(console)
    assert capfd.readouterr() == ("", "")


def use_everything(console: Console) -> None:
    with console:
        console.header(["header"])
        console.start(100, 10)
        console.step(REPORT)
        console.settings([{"key": "a", "value": 1, "origin": "b", "default": None}])
        console.progress(dataclasses.replace(REPORT, step=51))
        console.validating(1, 2)
        console.sample(50, "def", " f():\n\x07")
        console.answer("answer")
        console.validation(Validation(step=50, val_loss=1.0))
        console.event("event")
        console.warn("warning")
        console.finish([("a", "b")], ["c"])
        console.close()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_which_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_console(stream=Terminal()), LiveConsole)
    assert isinstance(open_console(stream=io.StringIO()), PlainConsole)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_console(stream=Terminal()), PlainConsole)
    monkeypatch.delenv("TERM")
    assert isinstance(open_console(stream=Terminal()), PlainConsole)
    closed = io.StringIO()
    closed.close()
    assert isinstance(open_console(stream=closed), PlainConsole)


def test_without_a_progress_bar_a_terminal_gets_plain_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_console(stream=Terminal(), progress_bar=False), PlainConsole)


@pytest.mark.parametrize("kind", [PlainConsole, LiveConsole])
@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "full"), ValueError("closed")])
def test_a_stream_that_fails_costs_the_output_only(
    kind: type[PlainConsole] | type[LiveConsole], error: Exception
) -> None:
    class Failing(Terminal):
        def write(self, text: str) -> int:
            raise error

    before = sys.stdout, sys.stderr
    use_everything(kind(Failing()))
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize("kind", [PlainConsole, LiveConsole])
def test_a_stream_that_fails_later(kind: type[PlainConsole] | type[LiveConsole]) -> None:
    stream = Terminal()
    console = kind(stream)
    console.start(100)
    console.step(REPORT)
    stream.close()
    console.step(dataclasses.replace(REPORT, step=100))
    console.event("lost")
    console.close()
    assert sys.stdout is not stream


def test_a_locale_that_cannot_show_a_path() -> None:
    raw = io.BytesIO()
    console = PlainConsole(io.TextIOWrapper(raw, encoding="ascii"))
    console.event("saved: /home/zoë/run")
    console.event("next")
    assert raw.getvalue() == b"saved: /home/zo?/run\nnext\n"


# ---- on a pseudo-terminal

LOOP = """
import dataclasses, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs behind
sys.path.insert(0, {root!r})
from tests.observe.test_console import REPORT, Validation
from megafp8.observe.live import open_console
with open_console() as console:
    console.header(["a run with a name in [brackets]"])
    console.start(40)
    print("ready", flush=True)
    for step in range(1, 41):
        time.sleep({pause})
        console.step(dataclasses.replace(REPORT, step=step))
        if step == 20:
            console.validation(Validation(step=step, val_loss=2.5))
            print("a library prints")
            print("and complains", file=sys.stderr)
            {at_20}
    console.finish([("where", "/a/long/path" * 20)])
print("stdout is back:", sys.stdout is sys.__stdout__)
"""

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run_on_terminal(
    at_20: str = "pass", pause: float = 0.001, interrupt: int | None = None, **env: str
) -> tuple[int, str]:
    """Run LOOP on a pseudo-terminal; return its exit code and everything that it wrote."""
    main, side = pty.openpty()
    program = LOOP.format(root=str(ROOT), at_20=at_20, pause=pause)
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", **env}
    environment.pop("PYTEST_CURRENT_TEST", None)
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=side,
        stdout=side,
        stderr=side,
        env=environment,
        start_new_session=True,
    )
    os.close(side)
    output = b""
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        if select.select([main], [], [], 0.2)[0]:
            try:
                chunk = os.read(main, 65536)
            except OSError:  # Linux raises it when the other side is closed
                break
            if not chunk:
                break
            output += chunk
            if interrupt is not None and b"ready" in output:
                child.send_signal(interrupt)
                interrupt = None
        elif child.poll() is not None:
            break
    code = child.wait()
    os.close(main)
    return code, output.decode()


def test_live_block_and_permanent_lines() -> None:
    code, output = run_on_terminal()
    assert code == 0, output
    text = ESCAPE.sub("", output)
    for line in (
        "a run with a name in [brackets]",
        "step 20/40 | val loss 2.5000",
        "a library prints",
        "and complains",
        "stdout is back: True",
    ):
        assert text.count(line + "\r\n") == 1, (line, text)
    assert "loss 5.1234 | val loss 2.5000 at 20\r\n" in text
    cost = "21.3k tok/s | MFU 41.2 % | mem 1.2 GiB"
    assert f"grad norm 0.87 | lr 9.8e-04 | {cost}\r\n" in text
    assert "step 40/40" in text
    assert "/a/long/path" * 20 in text, "a long path is one line, to be copied whole"


def cursor_is_visible(output: str) -> bool:
    return output.rfind("\x1b[?25h") >= output.rfind("\x1b[?25l")


def test_an_exception_gives_the_terminal_back() -> None:
    code, output = run_on_terminal(at_20="raise RuntimeError('boom')")
    assert code == 1
    assert cursor_is_visible(output)
    assert "RuntimeError: boom" in ESCAPE.sub("", output)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_nothing_to_mend(number: int) -> None:
    """The loop does not end by itself. It sleeps for short times, since a signal that comes just
    before a sleep begins is seen at its end."""
    code, output = run_on_terminal(at_20="while True: time.sleep(0.01)", interrupt=number)
    assert code != 0
    assert cursor_is_visible(output)


def test_no_color() -> None:
    _, coloured = run_on_terminal()
    _, plain = run_on_terminal(NO_COLOR="1")
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")
    assert colour.search(coloured)
    assert not colour.search(plain)
    assert "step 40/40" in ESCAPE.sub("", plain)


def test_a_reader_that_goes_away_does_not_end_the_run() -> None:
    program = LOOP.format(root=str(ROOT), at_20="pass", pause=0.001)
    program = re.sub(r'print\("(a library|ready).*', "pass", program)
    program = program[: program.index('print("stdout is back')] + "sys.stderr.write('done')"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    errors = child.stderr.read().decode()
    child.stderr.close()
    assert child.wait() == 0, errors
    assert errors.endswith("done")
