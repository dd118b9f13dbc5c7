"""Let pytest run chosen tests in a given order, and say what became of each and what it ran.

The environment names a file of JSON with what is asked for (`Asked`). Hypothesis reports its first
counterexample without looking for a smaller one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.mutate.runner import ASKED, Asked
from scripts.packages import packages

COMPILERS = ("cc", "gcc", "clang")


class Recorder:
    """Record outcomes, and with `cover` which lines each test executes in this process.

    Lines that run in a fixture of a wider scope than one test count for every test that uses the
    fixture. Tests that start processes are noted, since those lines are not seen.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.outcomes: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.fixtures: dict[str, list[str]] = {}
        self.starting: set[str] = set()  # contexts
        self.context = ""
        self.coverage: Any = None
        if asked.cover:
            from coverage import Coverage

            self.coverage = Coverage(
                data_file=None,
                config_file=False,
                include=[f"{asked.cover}/{name}/*" for name in packages(Path(asked.cover))],
                messages=False,
            )
            self.coverage.start()
            sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and Path(str(arguments[0])).name.startswith(COMPILERS):
            return
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "socket.connect"):
            self.starting.add(self.context)

    def _switch(self, context: str) -> str:
        before, self.context = self.context, context
        if self.coverage is not None:
            self.coverage.switch_context(context)
        return before

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what is not chosen, and order the rest."""
        if self.asked.chosen is not None:
            place = {name: index for index, name in enumerate(self.asked.chosen)}
            items[:] = sorted(
                (item for item in items if item.nodeid in place), key=lambda i: place[i.nodeid]
            )
        self.fixtures = {i.nodeid: list(getattr(i, "fixturenames", [])) for i in items}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Say which test runs."""
        self._switch(item.nodeid)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """Say which fixture of several tests runs."""
        if fixturedef.scope == "function":
            return (yield)
        before = self._switch(f"fixture {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self._switch(before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst outcome of a test's stages; an expected failure is no skip."""
        name = report.nodeid
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        outcome = "passed" if hasattr(report, "wasxfail") else report.outcome
        if self.outcomes.get(name, "passed") == "passed":
            self.outcomes[name] = outcome

    def pytest_sessionfinish(self) -> None:
        """Write the outcomes, and the lines."""
        found: dict[str, Any] = {"outcomes": self.outcomes, "seconds": self.seconds}
        if self.coverage is not None:
            self.coverage.stop()
            found |= {"lines": self._lines(), "starting": self._tests(sorted(self.starting))}
        Path(self.asked.report).write_text(json.dumps(found))

    def _lines(self) -> dict[str, dict[int, list[str]]]:
        """Return the tests that execute each line of each file; "" is what runs at imports."""
        data, lines = self.coverage.get_data(), {}
        for file in data.measured_files():
            name = str(Path(file).relative_to(self.asked.cover))
            by_line = data.contexts_by_lineno(file)
            lines[name] = {line: self._tests(contexts) for line, contexts in by_line.items()}
        return lines

    def _tests(self, contexts: list[str]) -> list[str]:
        found = set()
        for context in contexts:
            kind, _, fixture = context.partition(" ")
            if kind == "fixture":
                found |= {test for test, names in self.fixtures.items() if fixture in names}
            else:
                found.add(context)
        return sorted(found)


def pytest_configure(config: pytest.Config) -> None:
    """Leave out shrinking, which takes minutes; the same examples are tried in every run."""
    from hypothesis import Phase, settings

    settings.register_profile(
        "mutate",
        settings.get_profile("ci"),
        phases=(Phase.explicit, Phase.generate),
        database=None,
    )
    settings.load_profile("mutate")
    asked = json.loads(Path(os.environ[ASKED]).read_text())
    config.pluginmanager.register(Recorder(Asked(**asked)))
