"""Verification of live hosts: the hosts come from the inventory, the expectations from the same plan as the deploy.

pytest tests/host --inventory inventory/gpu.py [--limit NAME]
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import testinfra
from testinfra.host import Host

from rig.artifacts.rollback_states import rolled_back, state_file, state_of
from rig.catalog.entries import check_all
from rig.catalog.yaml_source import CatalogError
from rig.cli import ssh
from rig.cli.connect import ssh_words
from rig.cli.converge import RunFailed, asked_hosts, inventory_hosts, ssh_config
from rig.facts.report import HostReport
from rig.plan.host_plan import HostPlan, plan_from_facts, questions
from rigctl.contract import layout
from rigctl.contract.foreign import printable

_NOT_ENFORCED = pytest.StashKey[dict[str, list[str]]]()
_REMARKS = pytest.StashKey[list[str]]()
"""What is no failure but shall be known."""
_WARNINGS = pytest.StashKey[list[str]]()
_TARGETS = pytest.StashKey[list["Target"]]()
_HOSTS = pytest.StashKey[dict[str, str | None]]()
"""Host -> why it cannot be verified; None when it can."""


@dataclass(frozen=True)
class Target:
    """One live host and what it shall be."""

    name: str
    host: Host
    plan: HostPlan
    present: dict[str, Any]
    """Which state is in place (rig/artifacts/rollback_states.py)."""
    state: dict[str, Any]
    """What it shall be: the plan's state, or the recorded one that a rollback put in place."""

    def names(self, attribute: str) -> list[str]:
        """Entries of the plan that are also in the state: serving, environments, checkpoints."""
        there = self.state.get({"serving": "units"}.get(attribute, attribute))
        return [name for name in getattr(self.plan, attribute) if there is None or name in there]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--inventory", help="such as inventory/gpu.py")
    parser.addoption("--limit", action="append", default=[], help="a host, a group or a pattern")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_NOT_ENFORCED], config.stash[_REMARKS] = {}, []
    config.stash[_WARNINGS] = []


def pytest_sessionstart(session: pytest.Session) -> None:
    inventory = session.config.getoption("--inventory")
    if not inventory:
        raise pytest.UsageError("--inventory is missing: make verify INVENTORY=inventory/gpu.py")
    try:
        check_all()
        names = asked_hosts(inventory, session.config.getoption("--limit"))
        entries = {entry["name"]: entry["data"] for entry in inventory_hosts(inventory)}
        config = ssh_config(inventory)
        targets: list[Target] = []
        hosts: dict[str, str | None] = dict.fromkeys(names)
        for name in names:
            try:
                targets.append(_target(name, entries[name], config))
            except (RunFailed, CatalogError) as error:
                hosts[name] = str(error)
        session.config.stash[_TARGETS], session.config.stash[_HOSTS] = targets, hosts
    except (RunFailed, CatalogError) as error:
        raise pytest.UsageError(str(error)) from None


def _target(name: str, data: dict[str, Any], config: Path) -> Target:
    """Raises RunFailed, CatalogError for a host that cannot be verified."""
    if name.startswith("@") and name != "@local":
        raise RunFailed("no machine stands behind this name (pyinfra's connectors)")
    host = connect(name, data, config)
    try:
        deployed = host.run(f"[ -e {layout.RECEIPT} ] && echo yes || echo no")
    except RuntimeError as error:  # testinfra's, when ssh itself fails
        deployed = error.args[0]
    if deployed.rc != 0:
        said = deployed.stderr.strip() or f"exit code {deployed.rc}"
        raise RunFailed(f"cannot be reached: {ssh.refused(config, name, said, shlex.join(ssh_words(name, data)))}")
    if deployed.stdout.strip() != "yes":
        raise RunFailed(f"no deploy has come to its end here ({layout.RECEIPT} is missing): deploy first, then verify")
    result = host.run(HostReport().command({**questions(data), "probes": [], "hubs": {}, "driver_source": None}))
    facts = HostReport().process(result.stdout.splitlines())
    if "host" in facts.unknown:
        raise RunFailed(facts.unknown["host"])
    plan = plan_from_facts(data, facts)
    present, wanted = _json(host, layout.PRESENT_STATE), state_of(plan)
    restored = _json(host, state_file(present["id"])) if rolled_back(present) else {}
    return Target(name, host, plan, present, restored or wanted)


def _json(host: Host, path: str) -> dict[str, Any]:
    """A JSON object on the host; empty when it is absent or damaged."""
    try:
        found = json.loads(host.run("cat %s", path).stdout)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def connect(name: str, data: dict[str, Any], config: Path) -> Host:
    """The host, over the same way as every other verb. config: rig/cli/ssh.py's file."""
    sudo = bool(data.get("_sudo"))
    if name == "@local":
        host = testinfra.get_host("local://", sudo=sudo)
    else:
        words = shlex.join(["-o", "BatchMode=yes", "-o", "ControlMaster=auto", "-o", "ControlPersist=30"])
        words += " " + shlex.join(["-o", f'ControlPath="{config.parent}/cm-%C"'])
        host = testinfra.get_host(f"ssh://{ssh.alias(name)}", ssh_config=str(config), ssh_extra_args=words, sudo=sudo)
    # What a host prints is read by programs: never translated, and one strange byte ends nothing.
    backend, locale = host.backend, " ".join(f"{key}={value}" for key, value in layout.LOCALE.items())
    original = backend.get_command
    english = lambda command, *args: original(f"export {locale}; {backend.quote(command, *args)}")  # noqa: E731  # replaces a method
    backend.run_local = partial(_limited, backend)
    backend.get_command, backend.decode = english, lambda data: data.decode(errors="replace")
    return host


def _limited(backend: Any, command: str, *arguments: str) -> Any:
    """As the backend's own, but for the length of what it reads."""
    line = backend.quote(command, *arguments)
    done = ssh.limited(["sh", "-c", line])
    return backend.result(done.returncode, line.encode(), done.stdout, done.stderr)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "trouble" in metafunc.fixturenames:
        hosts = metafunc.config.stash[_HOSTS]
        metafunc.parametrize(("name", "trouble"), list(hosts.items()), ids=list(hosts))
        return
    targets = metafunc.config.stash[_TARGETS]
    things = {"configuration": "serving", "checkpoint": "checkpoints", "environment": "environments"}
    for fixture, attribute in things.items():
        if fixture in metafunc.fixturenames:
            pairs = [(target, name) for target in targets for name in target.names(attribute)]
            metafunc.parametrize(("target", fixture), pairs, ids=[f"{target.name}-{name}" for target, name in pairs])
            return
    if "target" in metafunc.fixturenames:
        metafunc.parametrize("target", targets, ids=[target.name for target in targets])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where no host can be verified, that is all there is to say."""
    if not config.stash[_TARGETS]:
        items[:] = [item for item in items if "trouble" in getattr(item, "fixturenames", ())]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A finding is told in its own words: the traceback into our test would say nothing about the host."""
    report = yield
    if report.failed and call.excinfo is not None and call.excinfo.errisinstance(AssertionError):
        report.longrepr = printable(str(call.excinfo.value).split("\nassert ", 1)[0], keep="\n")
    return report


@pytest.fixture
def not_enforced(request: pytest.FixtureRequest) -> Iterator[dict[str, list[str]]]:
    """Host -> limits that are set there and not enforced; told at the end of the run."""
    yield request.config.stash[_NOT_ENFORCED]


@pytest.fixture
def warnings(request: pytest.FixtureRequest) -> list[str]:
    """What is no failure and to be told at the end of the run."""
    return request.config.stash[_WARNINGS]


@pytest.fixture
def remarks(request: pytest.FixtureRequest) -> list[str]:
    """Lines that are told at the end of the run."""
    return request.config.stash[_REMARKS]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = [*config.stash[_REMARKS]]
    for name, limits in config.stash[_NOT_ENFORCED].items():
        lines.append(f"{name}: set, not enforced in this box: {', '.join(limits)}")
    for line in [*lines, *(f"warning: {warning}" for warning in config.stash[_WARNINGS])]:
        terminalreporter.write_line(printable(line))


def run(host: Host, command: str, *arguments: str) -> str:
    """Standard output of a command that must succeed. arguments: for each %s in it, quoted for the shell."""
    result = host.run(command, *arguments)
    assert result.rc == 0, f"`{command}` failed: {result.stderr.strip()}"
    return str(result.stdout)


def json_of(host: Host, path: str) -> Any:
    """A JSON file on the host."""
    return json.loads(run(host, "cat %s", path))
