"""Orders `kernel job` and `environment build`: what 0.3.0 wrote stays readable and means the same; no fault passes.

tests/fixtures/66d813d/kernels was written by the code of that commit.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rig.artifacts.engine_inputs import environment_build
from rig.artifacts.kernel_orders import kernel_job
from rig.catalog.entries import ROOT, Kernel
from rig.host.settings import HostSettings
from rig.plan.host_plan import HostPlan, host_plan
from rigctl.contract.environment_build import EnvironmentBuild
from rigctl.contract.kernel_job import KernelJob
from rigctl.contract.order import ContractError, Order
from rigctl.kernel import build, toolchain
from tests.unit.test_engines_and_units import data

FIXTURES = ROOT / "tests/fixtures/66d813d/kernels"
STATE: dict[str, Any] = json.loads((FIXTURES / "state.json").read_text())
BUILDS: dict[str, dict[str, Any]] = json.loads((FIXTURES / "environment-builds.json").read_text())
RELEASES = sorted(STATE["kernels"])


def old_job(release: str) -> KernelJob:
    return KernelJob.read(FIXTURES / f"{release}.json")


@pytest.mark.parametrize("release", RELEASES)
def test_an_old_order_has_its_digest_in_every_format(release: str) -> None:
    job = old_job(release)
    assert job.digest == STATE["kernels"][release]["digest"]
    assert KernelJob.parse_text(job.text(), "again") == job
    assert job.text() == (FIXTURES / f"{release}.json").read_text()


def test_what_a_later_format_added_counts_once_it_is_set() -> None:
    job = old_job("full")
    said = {"memory_limit": "1G", "unused_dependencies": ["x"], "shared_wheels": ["0" * 64]}
    assert job.model_copy(update=said).digest == job.digest, "the library is the same"
    dependency = job.dependencies["repo-a"].model_copy(update={"nested": {"ext/x": Path("/srv/x")}})
    for more in ({"system_packages": ["libnuma-dev"]}, {"dependencies": {**job.dependencies, "repo-a": dependency}}):
        assert job.model_copy(update=more).digest != job.digest


@pytest.fixture
def plan() -> HostPlan:
    """The host of the fixtures, as this version plans it from the recorded kernels."""
    now = host_plan(data("gpu"), "ubuntu-24.04", HostSettings())
    wide = now.data.model_copy(update={"kernel_store": "build@store:/srv/wheels", "wheels": "/srv/all-wheels"})
    environments = {}
    for release in RELEASES:
        env = now.environments["sglang-0.5.9" if release == "sglang-0.5.9" else "sglang-0.5.23"]
        kernel = Kernel.model_validate(STATE["kernels"][release]["kernel"])
        described = env.release.model_copy(update={"kernel": kernel})
        path = STATE["environments"][release]
        environments[release] = dataclasses.replace(env, name=release, path=path, release=described)
    return dataclasses.replace(now, data=wide, environments=environments)


@pytest.mark.parametrize("release", RELEASES)
def test_this_version_orders_what_the_old_one_did(release: str, plan: HostPlan) -> None:
    job, old = kernel_job(plan, release), old_job(release)
    # Their path names the lock of the tools, which may have changed since.
    same_tools = job.model_copy(update={"toolchain": old.toolchain})
    assert same_tools.digest == old.digest
    assert same_tools.text() == old.text()
    wanted = environment_build(plan.environments[release], "/opt/kimi-rig/env/.cache", None)
    assert (wanted.path, wanted.lock, wanted.patches) == (old.engine.path, old.engine.lock, old.engine.patches)


def test_a_wheel_that_the_old_version_built_is_found_in_the_store(tmp_path: Path) -> None:
    """The digest that names it has the old words, whatever the order calls them."""
    for name in ("source/kernels/pyproject.toml", "source/kernels/x.cu", "a/a.h", "b/b.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    document = json.loads((FIXTURES / "full.json").read_text())
    document |= {"root": str(tmp_path / "kernels"), "patches": None}
    document["source"]["path"] = str(tmp_path / "source")
    for name in ("a", "b"):
        document["dependencies"][f"repo-{name}"]["path"] = str(tmp_path / name)
    recorded = json.loads((FIXTURES / "wheel-inputs.json").read_text())
    chain = toolchain.Toolchain(tmp_path, tmp_path, tmp_path, recorded["values"]["versions"])
    found = build.gather(KernelJob.parse(document, "old"), chain)
    assert (found.digest, found.values) == (recorded["digest"], recorded["values"])


@pytest.mark.parametrize("name", sorted(BUILDS))
def test_an_old_order_for_an_environment_is_readable(name: str) -> None:
    old = BUILDS[name]
    order = EnvironmentBuild.parse(old, name)
    assert order.document() == old


# Faults

Path_ = tuple[str | int, ...]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=4)
ORDERS: tuple[tuple[type[Order], dict[str, Any]], ...] = (
    *((KernelJob, json.loads((FIXTURES / f"{release}.json").read_text())) for release in RELEASES),
    *((EnvironmentBuild, old) for old in BUILDS.values()),
)


def places(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Every place in a document, its own included."""
    yield path
    entries = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, each in entries:
        yield from places(each, (*path, key))


def at(document: Any, path: Path_) -> Any:
    for key in path:
        document = document[key]
    return document


@st.composite
def mutated(draw: st.DrawFn, documents: tuple[tuple[type[Order], dict[str, Any]], ...]) -> tuple[type[Order], Any, str]:
    """A document with one change, and the top-level key it is in."""
    model, document = draw(st.sampled_from(documents))
    changed = copy.deepcopy(document)
    path = draw(st.sampled_from([path for path in places(document) if path]))
    holder, key = at(changed, path[:-1]), path[-1]
    match draw(st.sampled_from(["replace", "remove", "add"])):
        case "replace":
            holder[key] = draw(VALUES)
        case "remove":
            del holder[key]
        case "add" if isinstance(holder, dict):
            new = draw(st.text() | st.sampled_from(sorted(model.model_fields)))
            return model, {**changed, new: draw(VALUES)}, new
    return model, changed, str(path[0])


def within(small: Any, large: Any) -> bool:
    """Whether `large` says all that `small` says; a number, a truth value and a text are never the same."""
    if isinstance(small, dict) and isinstance(large, dict):
        return all(key in large and within(value, large[key]) for key, value in small.items())
    return type(small) is type(large) and bool(small == large)


@settings(deadline=None)
@given(mutated(ORDERS))
def test_a_changed_order_is_read_as_it_stands_or_refused_by_its_field(change: tuple[type[Order], Any, str]) -> None:
    model, document, key = change
    try:
        order = model.parse(document, "ORDER")
    except ContractError as error:
        shown = key if key.isprintable() else ascii(key)  # for a terminal
        assert str(error).startswith("ORDER") and (shown or "there is no such key") in str(error)
    else:
        # Where no wheel is shared, the document has no such key.
        assert within(document, {"shared_wheels": []} | order.document())


def test_what_lies_on_a_host_may_be_anything(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    for text in (b"", b"{", b"[]", b"\xff", b"null", b"[" * 100_000, b'{"format": 2}', b'{"format": true}'):
        file.write_bytes(text)
        with pytest.raises(ContractError, match=str(file)):
            KernelJob.read(file)
    with pytest.raises(ContractError, match="cannot be read"):
        KernelJob.read(tmp_path)
