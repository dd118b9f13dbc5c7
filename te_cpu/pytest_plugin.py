"""Load Transformer Engine on the CPU before test modules are imported.

    pytest -p te_cpu [--te-version VERSION] [--te-skip-missing]

Tests, and all other code but torch's own, are then answered as if there were an H100: what asks
`torch.cuda.is_available()` at its top continues as on a GPU.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from te_cpu import cuda
from te_cpu.errors import MissingKernelError, VersionError
from te_cpu.loading import describe, load
from te_cpu.versions import DEFAULT_VERSION


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    group = parser.getgroup("te_cpu", "Transformer Engine on a CPU")
    group.addoption(
        "--te-version",
        metavar="VERSION",
        default=DEFAULT_VERSION,
        help=f"the version of Transformer Engine that the tests import (default {DEFAULT_VERSION})",
    )
    group.addoption(
        "--te-skip-missing",
        action="store_true",
        help="skip a test that needs a kernel which does not exist on the CPU, naming the kernel",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None]:
    """Load it before the first conftest.py, which may import it."""
    _load(early_config.known_args_namespace.te_version)
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    """Load it where a conftest.py has named this plugin."""
    _load(config.getoption("te_version"))


def _load(version: str) -> None:
    try:
        load(version)
    except VersionError as error:
        raise pytest.UsageError(str(error)) from error
    cuda.answer_everyone()


def pytest_report_header() -> str:
    """Return the line that says which version runs."""
    return describe()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a test as skipped that lacks a kernel, where that is asked for."""
    report = yield
    error = call.excinfo.value if call.excinfo is not None else None
    if item.config.getoption("te_skip_missing") and isinstance(error, MissingKernelError):
        path, line, _ = item.location
        report.outcome, report.longrepr = "skipped", (path, (line or 0) + 1, str(error))
    return report
