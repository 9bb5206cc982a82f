"""Rules of the whole suite: Triton's interpreter, and no test that is silently left out in CI."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator
from typing import TypeVar

import pytest

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

#: Set by `.ci/run`: a skipped test fails there, since CI installs everything the tests need.
NO_SKIPS = "FINALBENCH_TESTS_NO_SKIPS"
#: Tests of other people's programs that CI does not install, by the reason they give.
OPTIONAL = ("guidellm is not installed", "schemathesis is not installed")


def pytest_configure(config: pytest.Config) -> None:
    """Kernels run under the interpreter, unless the tests of a GPU are asked for.

    Triton looks at the variable when it is imported and when a kernel is defined. Test modules are
    imported in one process and many import Triton through transformers, so it is set before any.
    """
    if config.option.markexpr != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"
        # Workers share the cores; threads of one that wait for each other keep the other from work.
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ.setdefault(name, "1")
    # A shell starts what it puts in the background with the interrupt ignored, and children inherit
    # that; the tests of Ctrl-C must work there too.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Servers that tests start must not inherit it; tests/ops sets it for its own tests."""
    os.environ.pop("TRITON_INTERPRET", None)
    # A million objects of imported modules: the client collects garbage before every timed cell,
    # which took half a second here for each, and a tenth of that without them.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return _run_or_failed(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return _run_or_failed(report)


def _run_or_failed(report: Report) -> Report:
    """The report, turned into a failure where it is a skip that CI does not allow."""
    if os.environ.get(NO_SKIPS) == "1" and report.skipped and not hasattr(report, "wasxfail"):
        cause = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not cause.endswith(OPTIONAL):
            report.outcome = "failed"
            report.longrepr = f"{report.nodeid} did not run: {cause}; {NO_SKIPS} forbids that"
    return report
