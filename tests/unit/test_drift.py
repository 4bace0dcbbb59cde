"""Drift of small environments: files, packages, patches, and mixtures that break engines."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from rigctl import cli
from rigctl.engines import drift, patches
from rigctl.errors import RigctlError
from tests.unit.wheelhouse import install

SERIES = """What: x
Why: y
Upstream: some#1
Native-from: 2.0
Native-if: engine/core.py :: NATIVE

--- a/engine/core.py
+++ b/engine/core.py
@@ -1 +1 @@
-one = 1
+one = 2
"""


class Environment:
    """Two packages, their lock and a series, all as they should be."""

    def __init__(self, root: Path) -> None:
        self.env = root / "env"
        self.site = self.env / "lib/python3.11/site-packages"
        self.cache = root / "cache"
        self.lock = self.env / drift.LOCK
        self.series = self.env / drift.SERIES
        self.env.mkdir()
        self.series.mkdir()
        (self.series / "0001.patch").write_text(SERIES)
        self.add("engine", "1.0", {"engine/core.py": "one = 1\n", "engine/data.bin": "x"})
        self.add("sgl-kernel", "0.3.21", {"sgl_kernel/ops.so": "elf"})
        self.lock.write_text("engine==1.0 \\\n    --hash=sha256:00\nsgl_kernel==0.3.21\n")
        patches.apply(self.site, self.series)
        self.expected = drift.Expected(self.site, self.env / drift.STAMP, self.lock, self.series)

    def add(self, name: str, version: str, files: dict[str, str]) -> None:
        install(self.site, self.cache, name, version, files)

    def found(self, *, full: bool = True) -> list[tuple[str, str, str]]:
        findings = drift.inspect(self.expected, full=full)
        return [(each.kind, each.where, each.what) for each in findings if each.severity == "drift"]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path)


def test_untouched_has_no_drift(environment: Environment) -> None:
    assert drift.record(environment.expected) == []
    assert environment.found(full=False) == []
    assert environment.found() == []
    (environment.site / "engine/__pycache__").mkdir()
    (environment.site / "engine/__pycache__/core.cpython-311.pyc").write_text("bytecode")
    assert environment.found(full=False) == []
    assert environment.found() == []


def test_quick_check_needs_a_stamp(environment: Environment) -> None:
    with pytest.raises(RigctlError, match="no stamp; `rigctl drift check --full`"):
        environment.found(full=False)
    environment.expected.stamp.write_text("{")
    with pytest.raises(RigctlError, match="damaged stamp"):
        environment.found(full=False)


def test_changed_missing_and_foreign_files(environment: Environment) -> None:
    drift.record(environment.expected)
    ops = environment.site / "sgl_kernel/ops.so"
    ops.unlink()
    ops.write_text("ELF")
    (environment.site / "engine/data.bin").unlink()
    (environment.site / "sitecustomize.py").write_text("")
    assert environment.found(full=False) == [
        ("file", "engine/data.bin", "gone since it was proved"),
        ("file", "sitecustomize.py", "new since it was proved"),
        ("file", "sgl_kernel/ops.so", "changed since it was proved"),
    ]
    assert sorted(environment.found()) == [
        ("file", "engine/data.bin", "missing; engine put it there"),
        ("file", "sitecustomize.py", "in no package's RECORD"),
        ("kernel", "sgl_kernel/ops.so", "is not the file of sgl-kernel"),
    ]


def test_full_check_sees_what_size_and_time_hide(environment: Environment) -> None:
    drift.record(environment.expected)
    data = environment.site / "engine/data.bin"
    before = data.stat()
    data.write_text("y")
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert environment.found(full=False) == []
    assert environment.found() == [("file", "engine/data.bin", "is not the file of engine")]


def test_nothing_is_recorded_of_a_drifted_environment(environment: Environment) -> None:
    (environment.site / "sitecustomize.py").write_text("")
    assert drift.record(environment.expected)
    assert not environment.expected.stamp.exists()


def test_patched_files_against_the_series(environment: Environment) -> None:
    core = environment.site / "engine/core.py"
    core.unlink()
    core.write_text("one = 1\n")
    assert environment.found() == [("patch", "engine/core.py", "without its patch")]
    (environment.site / "engine/core.py").unlink()
    (environment.site / "engine/core.py").write_text("one = 3\n")
    kinds = {(kind, where) for kind, where, _ in environment.found()}
    assert kinds == {("patch", "engine/core.py"), ("file", "engine/core.py")}


def test_packages_against_the_lock(environment: Environment) -> None:
    environment.lock.write_text("engine==1.1\nsgl-kernel==0.3.20\nabsent==2\n")
    environment.add("stray", "1", {"stray.py": ""})
    environment.add("engine", "0.9", {"engine/old.py": ""})
    assert environment.found() == [
        ("package", "engine", "installed 2 times: 0.9, 1.0"),
        ("package", "stray", "not in the lock"),
        ("package", "absent", "missing; the lock has 2"),
        ("package", "engine", "is 0.9; the lock has 1.1"),
        ("kernel", "sgl-kernel", "is 0.3.21; the lock has 0.3.20"),
    ]


def test_one_package_overwriting_another_is_noted(environment: Environment) -> None:
    environment.add("cuda-bindings", "13", {"cuda/runtime.so": "13"})
    (environment.site / "cuda/runtime.so").unlink()
    environment.add("cuda-python", "12.6", {"cuda/runtime.so": "12"})
    environment.lock.write_text(environment.lock.read_text() + "cuda-bindings==13\ncuda-python==12.6\n")
    findings = drift.inspect(environment.expected, full=True)
    assert findings == [
        drift.Finding("overlap", "cuda/runtime.so", "cuda-python overwrote that of cuda-bindings", "note")
    ]


def test_flashinfer_parts() -> None:
    parts = {"flashinfer-python": "0.6.3", "flashinfer-cubin": "0.6.3", "flashinfer-jit-cache": "0.6.3+cu129"}
    assert drift.flashinfer_parts(parts) == []
    assert drift.flashinfer_parts({"flashinfer-python": "0.6.3"}) == []
    (finding,) = drift.flashinfer_parts(parts | {"flashinfer-cubin": "0.6.4"})
    assert finding.what.startswith("versions disagree: flashinfer-python 0.6.3, flashinfer-cubin 0.6.4")


def test_several_nccl(tmp_path: Path) -> None:
    site = tmp_path / "site"
    folder = site / "nvidia/nccl/lib"
    folder.mkdir(parents=True)
    (folder / "libnccl.so.2").touch()
    (folder / "libnccl.so").symlink_to("libnccl.so.2")
    assert drift.nccl_libraries(site) == []
    (site / "other").mkdir()
    (site / "other/libnccl.so.2").touch()
    (finding,) = drift.nccl_libraries(site)
    assert finding.severity == "drift"
    assert finding.what.startswith("2 NCCL libraries: ")


def test_a_wheel_with_a_wrong_record(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a file is held to what it really is, and still proved."""
    data = environment.site / "engine/data.bin"
    data.unlink()
    data.write_text("as published")
    assert environment.found() == [("file", "engine/data.bin", "is not the file of engine")]
    really = hashlib.sha256(b"as published").hexdigest()
    monkeypatch.setattr(drift, "record_errors", lambda: {("engine", "1.0", "engine/data.bin"): really})
    assert environment.found() == []
    data.write_text("edited")
    assert environment.found() == [("file", "engine/data.bin", "is not the file of engine")]


def test_command_line(environment: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--env", str(environment.env)]
    assert cli.main(["drift", "check", *where]) == 1
    assert "`rigctl drift check --full` proves the environment and writes it anew" in capsys.readouterr().err
    assert cli.main(["drift", "check", "--full", *where]) == 0
    assert cli.main(["drift", "check", *where]) == 0
    (environment.site / "sitecustomize.py").write_text("")
    capsys.readouterr()
    assert cli.main(["drift", "check", *where, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["where"] == "sitecustomize.py"
    assert cli.main(["drift", "check", "--full", *where]) == 1
    (environment.site / "sitecustomize.py").unlink()
    # A file that was restored byte for byte is another inode: the full proof renews what the quick check compares with.
    data = environment.site / "engine/data.bin"
    data.unlink()
    data.write_text("x")
    assert cli.main(["drift", "check", *where]) == 1
    assert cli.main(["drift", "check", "--full", *where]) == 0
    assert cli.main(["drift", "check", *where]) == 0


def test_a_lock_for_several_interpreters_is_read_for_this_one() -> None:
    text = "one==1 ; sys_platform == 'win32' \\\n    --hash=sha256:0\ntwo[x]==2 ; python_version >= '3' \\\nTwo_b==3\n"
    assert drift.read_lock(text) == {"two": "2", "two-b": "3"}


def test_a_kernel_library_of_ours_is_judged_apart() -> None:
    """Its files are notes, also those of a wheel that was put over it; nothing else is."""
    found = [
        drift.Finding("file", "sgl_kernel/ops.so", "changed since it was proved"),
        drift.Finding("file", "sgl_kernel-0.4.dist-info/RECORD", "new since it was proved"),
        drift.Finding("kernel", "sgl-kernel", "is 0.4; the lock has 0.3"),
        drift.Finding("file", "sgl_kernels/x.py", "changed since it was proved"),
    ]
    apart = list(drift.kernel_apart(found, ["sgl-kernel"], ("sgl_kernel/", "sgl_kernel-")))
    assert [each.severity for each in apart] == ["note", "note", "note", "drift"]
    assert list(drift.kernel_apart(found, ["sgl-kernel"], ())) == found, "the lock's own wheel is drift like any other"
