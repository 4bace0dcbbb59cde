"""CHANGELOG.md names each version that hosts may have by its commit: `make test-upgrade` starts from the last one."""

from __future__ import annotations

import subprocess
import tomllib

import pytest

from rig.catalog.entries import ROOT
from tests.upgrade.changelog import CHANGELOG, versions


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)


def test_sections_are_in_the_form_that_is_read_and_numbers_fall() -> None:
    unreleased, landed = versions(CHANGELOG.read_text())
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == unreleased
    numbers = [tuple(map(int, number.split("."))) for number in (unreleased, *(each.number for each in landed))]
    assert len(numbers) > 1 and numbers == sorted(set(numbers), reverse=True)
    assert [each.date for each in landed] == sorted((each.date for each in landed), reverse=True)


@pytest.mark.parametrize(
    "text", ["## Unreleased\n", "## 0.1.0 (e91294b, 2026-11-30)\n", "## Unreleased (0.2.0)\n\n## 0.1.0 (2026-11-30)\n"]
)
def test_other_sections_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="is expected"):
        versions(text)


def test_commits_are_those_that_landed() -> None:
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("no whole git history here: an unpacked archive, or a shallow clone")
    for each in versions(CHANGELOG.read_text())[1]:
        ancestor = git("merge-base", "--is-ancestor", each.commit, "HEAD")
        assert ancestor.returncode == 0, f"{each.number}: {each.commit} is no commit before this one {ancestor.stderr}"
        assert git("log", "-1", "--format=%cs", each.commit).stdout.strip() == each.date
