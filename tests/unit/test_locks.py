"""The engines' lock files agree with their recipes and carry nothing but packages and hashes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rig.catalog.entries import ROOT, load_catalog
from rig.maintain import locks
from rig.maintain.release_add import needs_of
from rigctl.engines.drift import read_lock
from tests.support.plans import SHIPPED

RECIPES = locks.read_recipes()
SHIPPED_RELEASES = load_catalog(None, SHIPPED).releases


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.file_name)
def test_lock_and_recipe_agree(recipe: locks.Recipe) -> None:
    text = (locks.LOCKS / recipe.file_name).read_text()
    pinned = read_lock(text)
    for package in recipe.packages:
        name, exactly, version = package.partition("==")
        if exactly:
            assert pinned[name.partition("[")[0]] == version
    # An engine with all it needs is more than a hundred packages; a toolchain is few.
    assert len(pinned) > (100 if recipe.release in SHIPPED_RELEASES else 5)
    assert len(pinned) == len(re.findall(r"^\S+==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE))
    assert not re.search(r"://|^--|^-[a-z]", text, re.MULTILINE), "an index, a link or an option"


@pytest.mark.parametrize("name", SHIPPED_RELEASES)
def test_release_recipe_and_lock_agree(name: str) -> None:
    """One version in the catalogue, in the recipe and in every lock; a lock for every Python that the release names."""
    release = SHIPPED_RELEASES[name]
    mine = {recipe.python: recipe for recipe in RECIPES if recipe.release == name}
    assert set(release.python) == mine.keys()
    for python, recipe in mine.items():
        lock = ROOT / release.lock.format(python=python.replace(".", ""))
        assert lock == locks.LOCKS / recipe.file_name
        assert f"{release.package}=={release.version}" in recipe.packages
        pinned = read_lock(lock.read_text())
        assert pinned[release.package] == release.version
        cuda = {package for package in pinned if package.startswith("nvidia-cuda-runtime")}
        assert bool(cuda) == (release.accelerator == "cuda")
        if release.minimum_cuda:
            needed = needs_of(lock.read_text(), recipe.platform)
            assert needed["minimum_cuda"].partition(".")[0] == release.minimum_cuda.partition(".")[0]
        if release.index:
            assert recipe.index == release.index.model_dump()


def test_cuda_bindings_are_of_one_cuda() -> None:
    """cuda-python 12.6 beside cuda-bindings 13 overwrites its files: the engine then fails to import."""
    for recipe in RECIPES:
        pinned = read_lock((locks.LOCKS / recipe.file_name).read_text())
        if "nvidia-nccl-cu13" not in pinned and "nvidia-nccl-cu12" not in pinned:
            continue  # a CPU build
        if "cuda-python" not in pinned:
            continue  # a trainer: no engine of it writes into cuda/bindings
        majors = {pinned[name].partition(".")[0] for name in ("cuda-python", "cuda-bindings")}
        toolkit = "13" if "nvidia-nccl-cu13" in pinned else "12"
        assert majors == {toolkit}, recipe.file_name


def test_recipe_errors_name_the_entry(tmp_path: Path) -> None:
    path = tmp_path / "recipes.yaml"
    path.write_text("python: ['3.11']\nplatform: x\nreleases:\n  some-1: {packges: [a]}\n")
    with pytest.raises(locks.LockError, match=r"recipes\.yaml: some-1: unknown key packges"):
        locks.read_recipes(path)
    path.write_text("python: ['3.11']\nplatform: x\nreleases:\n  some-1: {until: 2026-01-01}\n")
    with pytest.raises(locks.LockError, match="some-1: no packages"):
        locks.read_recipes(path)
