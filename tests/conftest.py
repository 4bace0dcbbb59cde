"""For every run: nothing outlives its test, and durations are printed by folder."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest
from hypothesis import settings

from tests.support.leftovers import Watcher, marked

# A busy machine is no fault of what is tested.
settings.register_profile("kimi-rig", deadline=None)
settings.load_profile("kimi-rig")

WATCHER = pytest.StashKey[Watcher]()
_numbers = itertools.count()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # one of pytest-xdist's workers is a process of the run
        config.stash[WATCHER] = Watcher()


def pytest_unconfigure(config: pytest.Config) -> None:
    if watcher := config.stash.get(WATCHER, None):
        watcher.end()


@pytest.fixture(scope="session")
def watcher(pytestconfig: pytest.Config) -> Watcher:
    """Clears up when the run ends; not for tests on several workers."""
    return pytestconfig.stash[WATCHER]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with marked(next(_numbers)):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds: defaultdict[str, float] = defaultdict(float)
    tests: defaultdict[str, set[str]] = defaultdict(set)
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            folder = str(PurePosixPath(report.nodeid.partition("::")[0]).parent)
            seconds[folder] += report.duration
            tests[folder].add(report.nodeid)
    for folder, total in sorted(seconds.items(), key=lambda one: -one[1]):
        terminalreporter.write_line(f"{folder}: {total:.1f} s in {len(tests[folder])} tests")
