"""Faults of a build, each with the real compiler: what is told, what is kept, and that the next run repairs it.

Wrong commit, absent dependency, old nvcc and new gcc need no compiler: tests/unit/test_kernel.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.catalog.entries import ROOT
from rigctl.engines import drift
from rigctl.engines.installed import distributions, site_packages
from tests.kernel.conftest import HERE, UV, Bench, kill_tree, run, until

# The largest file takes about 1.6 GiB.
STORED = HERE / "stored.py"
LESS = {"CUDAFLAGS": "-DHEAVY_PERCENT=60"}


def in_group(bench: Bench, group: Path, jobs: int) -> tuple[int, str]:
    """A build with all its processes in a memory control group, without ccache; exit code and what it says."""
    bench.changes["environment"] = {**bench.changes.get("environment", {}), "CCACHE_DISABLE": "1"}
    file = bench.root / "rig-kernel.json"
    file.write_text(json.dumps(bench.content()))
    script = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} {STORED} {file} {jobs}"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/files/hostkit:{ROOT}", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("memory_group", [2000], indirect=True)
def test_compilers_killed_for_memory_run_again_with_fewer_jobs(bench: Bench, memory_group: Path) -> None:
    """All 14 files at once do not fit, one does: the need was said to be small, so the launcher could not know."""
    bench.changes |= {"memory_mib": {"default": 10}, "drop_targets": ["flash_ops"], "environment": LESS}
    code, said = in_group(bench, memory_group, jobs=10)
    assert code == 0, said
    assert re.search(r"was killed for want of memory: once more, with 5 jobs", said), said
    [wheel] = bench.stored()
    receipt = json.loads((wheel.parent / "receipt.json").read_text())
    assert receipt["attempts"] == 2 and receipt["jobs"] == 5
    assert all(held == {"sm_120a": 6} for held in receipt["cubins"].values()) and len(receipt["cubins"]) == 2


@pytest.mark.parametrize("memory_group", [900], indirect=True)
def test_a_file_that_never_fits_is_named(bench: Bench, memory_group: Path) -> None:
    """Killed alone it will not fit a second time: that is not tried, and the next build knows it before it starts."""
    bench.changes["environment"] = LESS
    code, said = in_group(bench, memory_group, jobs=1)
    assert code == 1 and "huge.cu was killed\n" in said and "once more" not in said, said
    named = r"kernels/csrc/huge.cu \(\d+ MiB\) needs more than the 900 MiB that a build may take here"
    assert re.search(named, said) and "all else is compiled: raise memory_limit" in said, said
    code, said = in_group(bench, memory_group, jobs=1)
    assert code == 1 and "huge.cu is too large" in said and re.search(named, said), said
    assert bench.stored() == [] and bench.state()["state"] == "missing"


@pytest.fixture
def little_disk(bench: Bench) -> Iterator[Path]:
    """A file system of 4 MiB for the work directories."""
    place = bench.root / "kernels" / "work"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_told_and_the_build_goes_on_after_it(bench: Bench, little_disk: Path) -> None:
    bench.small()
    bench.changes["minimum_disk_mib"] = 0
    filler = little_disk / "filler"
    filler.write_bytes(b"\0" * (3500 << 10))
    said = bench.rigctl(code=1)
    assert re.search(r"no space left on the disk of|could not be copied to .*No space left on device", said), said
    assert bench.stored() == []
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,size=256m", str(little_disk)], check=True)
    assert bench.built(1).receipt["cubins"]


def test_too_little_disk_is_told_before_anything_is_built(bench: Bench) -> None:
    bench.small()
    bench.changes["minimum_disk_mib"] = 1 << 30
    said = bench.rigctl(code=1)
    assert "MiB free, a build takes 1073741824: make room" in said and "building" not in said


def test_a_build_killed_half_way_goes_on_where_it_ended(bench: Bench) -> None:
    bench.changes |= {"jobs": 1, "environment": {**bench.content()["environment"], "CCACHE_DISABLE": "1"}}
    process = bench.start()
    until(process, "[3/8]")
    time.sleep(0.5)  # ninja says so before it notes it
    kill_tree(process)
    assert bench.compiled_now() == 3 and bench.stored() == []
    said = bench.rigctl()
    receipt = bench.receipt()
    assert "going on with 3 objects" in said and receipt["objects_before"] == 3
    # Of seven files four were to come; a fifth includes a header that configuration writes anew (ccache is off here).
    assert receipt["compiled"] == 5 and receipt["steps"] == 6, receipt
    assert bench.state()["state"] == "installed"


def test_a_source_edited_during_the_build_is_noticed(bench: Bench) -> None:
    bench.small()
    bench.changes["jobs"] = 1
    process = bench.start()
    said = until(process, "[1/")
    header = bench.source / "kernels" / "csrc" / "relu.cu"
    header.write_text(header.read_text() + "\n// edited\n")
    rest, _ = process.communicate(timeout=300)
    assert process.returncode == 1, "".join(said) + rest
    assert "was edited while it was built; nothing was installed, deploy again" in rest and bench.stored() == []
    assert bench.built(1).receipt["cubins"], "the next build takes the new state"


def test_two_at_once_are_one_build(bench: Bench) -> None:
    first = bench.start()
    until(first, "building with")
    second = bench.start()
    told, _ = second.communicate(timeout=600)
    said, _ = first.communicate(timeout=600)
    assert (first.returncode, second.returncode) == (0, 0), said + told
    assert "another build of rig-kernel is at work: waiting for it" in told and "building with" not in told
    assert len(bench.stored()) == 1 and bench.state()["state"] == "installed"


def test_a_later_installation_over_the_kernel_is_noticed_and_repaired(bench: Bench) -> None:
    bench.rigctl()
    python = f"{bench.parts.engine}/bin/python"
    run(
        [
            UV,
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--reinstall",
            "--no-cache",
            "--python",
            python,
            str(bench.parts.stock),
        ]
    )
    state = bench.state()
    assert state["state"] == "replaced" and "put another rig-kernel over ours" in state["why"]
    said = bench.rigctl()
    assert "building" not in said and "is installed in" in said
    assert bench.state()["state"] == "installed" and bench.imports() == "rig_kernel.scale"


def test_an_installation_killed_half_way_is_repaired(bench: Bench) -> None:
    bench.rigctl()
    site = site_packages(bench.parts.engine)
    [ours] = [each for each in distributions(site) if each.name == "rig-kernel"]
    (ours.dist_info / "RECORD").unlink()
    next(site.glob("rig_kernel/sm100/*.so")).unlink()
    note = bench.parts.engine / "kimi-kernel.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "digest": None}))
    assert bench.state()["state"] == "built"
    expected = drift.Expected(site, bench.parts.engine / drift.STAMP, bench.parts.lock)
    findings = drift.inspect(expected, full=False)
    assert findings and {each.severity for each in findings} == {"note"}, "the stage before this one goes on"
    bench.rigctl()
    assert bench.state()["state"] == "installed"


def test_a_file_edited_in_place_is_repaired(bench: Bench) -> None:
    """The editor wrote into the very file, to which an installer's cache may be linked."""
    bench.rigctl()
    path = next(site_packages(bench.parts.engine).glob("rig_kernel/__init__.py"))
    with path.open("a") as file:
        file.write("edited = True\n")
    assert bench.state()["state"] == "replaced"
    bench.rigctl()
    assert bench.state()["state"] == "installed" and "edited" not in path.read_text()


def test_an_engine_in_use_keeps_its_kernel(bench: Bench) -> None:
    python = f"{bench.parts.engine}/bin/python"
    engine = subprocess.Popen([python, "-c", "import numpy; print('up', flush=True); input()"], stdin=-1, stdout=-1)
    assert engine.stdout is not None and engine.stdout.readline() == b"up\n"
    try:
        said = bench.rigctl(code=1)
        assert f"is in use (process {engine.pid}): stop the engine" in said
        assert bench.state()["state"] == "built", "the wheel waits in the store"
    finally:
        engine.kill()
        engine.wait()
    assert "building" not in bench.rigctl()


def test_what_does_not_compile_is_named(bench: Bench) -> None:
    bench.small()
    (bench.source / "kernels" / "csrc" / "relu.cu").write_text('#include "not_there.h"\n')
    said = bench.rigctl(code=1)
    assert "kernels/csrc/relu.cu does not compile (above)" in said and "not_there.h" in said
