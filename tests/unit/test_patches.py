"""The patch engine on a small package: states, new inodes, nothing on a conflict."""

from __future__ import annotations

import py_compile
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rigctl.engines import patch_series, patches
from rigctl.errors import RigctlError
from tests.unit.wheelhouse import install

ROOT = Path(__file__).resolve().parents[2]
ONE = "first\nsecond\nthird\nfourth\n"
TWO = "def two():\n    return 1\n"
HEADER = """What: x
Why: y
 on two lines
Upstream: some#1
Native-from: 2.0
Native-if: engine/{stem}.py :: NATIVE
"""
PATCH_ONE = (
    "--- a/engine/one.py\n+++ b/engine/one.py\n@@ -1,2 +1,3 @@\n first\n+between\n second\n@@ -4 +5 @@\n-fourth\n+4th\n"
)
PATCH_TWO = "--- a/engine/two.py\n+++ b/engine/two.py\n@@ -2 +2 @@\n-    return 1\n+    return 2\n"


class Engine:
    """An installed package, the cache it is linked with, and a series for it."""

    def __init__(self, root: Path, one: str = ONE, two: str = TWO) -> None:
        self.env = root / "env"
        self.site = self.env / "lib/python3.11/site-packages"
        self.cache = root / "cache"
        self.series = root / "series"
        files = {"engine/__init__.py": "", "engine/one.py": one, "engine/two.py": two}
        install(self.site, self.cache, "engine", "1.0", files)
        self.series.mkdir()
        (self.series / "0001-one.patch").write_text(HEADER.format(stem="one") + "\n" + PATCH_ONE)
        (self.series / "0002-two.patch").write_text(HEADER.format(stem="two") + "\n" + PATCH_TWO)

    def text(self, name: str) -> str:
        return (self.site / "engine" / name).read_text()

    def state(self) -> tuple[str, str | None, list[str]]:
        report = patches.examine(self.site, self.series)
        return report.state, report.origin, [each.state for each in report.files]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def test_apply_again(engine: Engine) -> None:
    assert engine.state() == ("applies", None, ["pristine", "pristine"])
    _, changed = patches.apply(engine.site, engine.series)
    assert changed == ["engine/one.py", "engine/two.py"]
    assert engine.text("one.py") == "first\nbetween\nsecond\nthird\n4th\n"
    assert engine.state() == ("already there", "ours", ["ours", "ours"])
    stamps = [path.stat().st_mtime_ns for path in sorted(engine.site.rglob("*.py"))]
    assert patches.apply(engine.site, engine.series)[1] == []
    assert [path.stat().st_mtime_ns for path in sorted(engine.site.rglob("*.py"))] == stamps


def test_hard_linked_cache_keeps_its_bytes(engine: Engine) -> None:
    cached = engine.cache / "engine-1.0/engine/one.py"
    assert cached.samefile(engine.site / "engine/one.py")
    (engine.site / "engine/one.py").chmod(0o640)
    patches.apply(engine.site, engine.series)
    assert cached.read_text() == ONE
    assert not cached.samefile(engine.site / "engine/one.py")
    assert (engine.site / "engine/one.py").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("mode", list(py_compile.PycInvalidationMode))
def test_bytecode_is_not_stale(engine: Engine, mode: py_compile.PycInvalidationMode) -> None:
    def answer() -> str:
        code = "import engine.two; print(engine.two.two())"
        command = [sys.executable, "-c", code]
        environment = {"PYTHONPATH": str(engine.site)}
        return subprocess.run(command, env=environment, text=True, capture_output=True, check=True).stdout.strip()

    py_compile.compile(str(engine.site / "engine/two.py"), invalidation_mode=mode)
    assert answer() == "1"
    patches.apply(engine.site, engine.series)
    assert answer() == "2"


def test_an_edited_file_conflicts_and_nothing_changes(engine: Engine) -> None:
    edited = engine.site / "engine/two.py"
    edited.unlink()
    edited.write_text(TWO.replace("return 1", "return 7"))
    with pytest.raises(RigctlError, match=r"hunk 1, line 2: expected '    return 1', found '    return 7'"):
        patches.apply(engine.site, engine.series)
    assert engine.text("one.py") == ONE
    edited.write_text(TWO + "# a note\n")
    with pytest.raises(RigctlError, match="was edited: it is not the wheel's file"):
        patches.apply(engine.site, engine.series)


def test_edited_after_patching_is_told(engine: Engine) -> None:
    patches.apply(engine.site, engine.series)
    with (engine.site / "engine/two.py").open("a") as handle:
        handle.write("# a note\n")
    with pytest.raises(RigctlError, match="it has our hunks, and other changes"):
        patches.apply(engine.site, engine.series)


def test_what_was_begun_is_finished(engine: Engine) -> None:
    patches.apply(engine.site, engine.series)
    (engine.site / "engine/two.py").write_text(TWO)
    assert engine.state() == ("applies", None, ["ours", "pristine"])
    assert patches.apply(engine.site, engine.series)[1] == ["engine/two.py"]
    assert engine.state()[:2] == ("already there", "ours")


def test_hunks_do_not_slide(tmp_path: Path) -> None:
    engine = Engine(tmp_path, one="new line above\n" + ONE)
    assert engine.state()[0] == "conflicts"
    with pytest.raises(RigctlError, match="hunk 1, line 1: expected 'first', found 'new line above'"):
        patches.apply(engine.site, engine.series)


def test_native_feature_is_left_alone(tmp_path: Path) -> None:
    engine = Engine(tmp_path, one="NATIVE\n", two="NATIVE\n")
    assert engine.state()[:2] == ("already there", "native")
    assert patches.apply(engine.site, engine.series)[1] == []
    assert engine.text("one.py") == "NATIVE\n"


def test_half_native_is_refused(tmp_path: Path) -> None:
    engine = Engine(tmp_path, one=ONE + "NATIVE\n")
    with pytest.raises(RigctlError, match=r"part of the feature itself \(0001-one\.patch\)"):
        patches.apply(engine.site, engine.series)


def test_file_without_record_or_missing(engine: Engine) -> None:
    (engine.site / "engine/two.py").unlink()
    with pytest.raises(RigctlError, match=r"engine/two\.py: not installed"):
        patches.apply(engine.site, engine.series)
    (engine.site / "engine-1.0.dist-info/RECORD").unlink()
    assert "no RECORD names it" in patches.examine(engine.site, engine.series).conflict()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no diff at all\n", "not a unified diff"),
        ("What: x\n\n" + PATCH_ONE, "header lacks Why, Upstream, Native-from, Native-if"),
        (
            HEADER.format(stem="one").replace(" :: NATIVE", "") + "\n" + PATCH_ONE,
            "Native-if is 'GLOB :: REGEX'",
        ),
        (
            HEADER.format(stem="one") + "\n" + PATCH_ONE.replace("engine", "../engine"),
            "outside site-packages",
        ),
        (
            HEADER.format(stem="one") + "\n" + PATCH_ONE.replace("a/engine/one.py", "/dev/null"),
            "only changes to a file",
        ),
        (HEADER.format(stem="one") + "\n" + PATCH_ONE.replace("-1,2", "-1,3"), "2 old and 3 new lines"),
        (HEADER.format(stem="one") + "\n" + PATCH_ONE + "junk\n", "unexpected line 'junk'"),
    ],
)
def test_malformed_patches_are_refused(text: str, message: str) -> None:
    with pytest.raises(RigctlError, match=message):
        patch_series.parse_patch("bad.patch", text.encode())


@given(st.data())
def test_a_mutated_patch_is_read_or_refused(data: st.DataObject) -> None:
    text = (HEADER.format(stem="one") + "\n" + PATCH_ONE + PATCH_TWO).encode()
    at = data.draw(st.integers(0, len(text)))
    text = text[:at] + data.draw(st.binary(max_size=4)) + text[at + data.draw(st.integers(0, 30)) :]
    try:
        patch = patch_series.parse_patch("mutated.patch", text)
    except RigctlError as error:
        assert str(error).startswith("mutated.patch: ")
    else:
        assert patch.files and all(".." not in file.path for file in patch.files)


SHIPPED = sorted(path for path in (ROOT / "files/patches").glob("*/*") if path.is_dir())


@pytest.mark.parametrize("directory", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_shipped_series_are_well_formed(directory: Path) -> None:
    """At most one line of context, and both common tools read them."""
    for path in sorted(directory.glob("*.patch")):
        patch = patch_series.parse_patch(path.name, path.read_bytes())
        body = path.read_text().partition("\n--- ")[2]
        assert not re.search(r"\n .*\n ", body), f"{path}: more than one line of context"
        command = ["git", "apply", "--numstat", str(path)]
        listed = subprocess.run(command, text=True, capture_output=True, check=True).stdout
        assert [line.split("\t")[2] for line in listed.splitlines()] == [each.path for each in patch.files]
