"""What a project as hard as the real one asks: dependencies, packages, large files, and people who stop a build.

The rows are those of the trial with sgl-kernel. Those that need no compiler are in tests/unit/test_kernel.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rig.catalog.entries import ROOT
from rigctl.kernel import install
from tests.kernel.conftest import HERE, Bench, until
from tests.kernel.test_faults import in_group
from tests.support.unconfined import RIGCTL

MEMOS = "kernels/memos/rig-kernel"


def plan(bench: Bench, code: int = 0) -> dict[str, Any]:
    """What `rigctl kernel plan` says."""
    process = bench.start("plan", "--json")
    said, _ = process.communicate(timeout=600)
    assert process.returncode == code, said
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def test_a_plan_names_what_is_compiled_before_and_the_build_does_it(bench: Bench) -> None:
    """Torch by its name alone, a header package, nested and written dependencies: nothing of it is in the way."""
    bench.changes["environment"] = {**bench.content()["environment"], "CCACHE_DISABLE": "1"}
    before = plan(bench)
    assert (before["missing"], before["beyond"], before["files"], before["measured"]) == ([], {}, 7, 0)
    assert set(before["largest"].values()) == {400} and before["seconds"] > 0
    assert bench.stored() == [] and bench.compiled_now() == 0, "it builds nothing"
    bench.rigctl()
    receipt = bench.receipt()
    assert (
        receipt["compiled"] == 7 and receipt["peak_mib"] > 100 and receipt["system_packages"].keys() == {"libnuma-dev"}
    )
    assert receipt["inputs"]["dependencies"].keys() == {
        *("repo-inner", "repo-mathlib", "repo-shapes", "repo-shapes/ext/table")
    }
    assert not (bench.root / "shapes" / "ext").exists(), "the operator's tree has no submodule, the copy has"
    assert plan(bench)["stored"] is True
    bench.changes["defines"] = {**bench.content()["defines"], "RIG_KERNEL_THREADS": "1"}
    again = plan(bench)
    assert (again["files"], again["measured"]) == (7, 7), "the last build taught what each file takes"
    assert again["largest"]["csrc/extension.cpp"] > 400, "the measured need, above the stated one"


def test_all_that_is_missing_is_named_at_once_before_anything_is_built(bench: Bench) -> None:
    bench.changes |= {
        "system_packages": ["libnuma-dev", "librig-absent-dev"],
        "unused_dependencies": [],
        "dependencies": {
            **bench.content()["dependencies"],
            "repo-inner": {"path": str(bench.root / "absent")},
            "repo-shapes": {"path": str(bench.root / "shapes"), "nested": {"ext/table": str(bench.root / "gone")}},
        },
    }
    named = (
        f"{bench.root}/absent: not there; it is dependency repo-inner of rig-kernel",
        f"{bench.root}/gone: not there; it is dependency repo-shapes/ext/table of rig-kernel",
        "packages librig-absent-dev are not installed: deploy, or apt-get install librig-absent-dev",
        "repo-extra is declared in source/kernels/CMakeLists.txt and not given",
    )
    missing = plan(bench, code=1)["missing"]
    assert len(missing) == len(named) and all(any(name in each for each in missing) for name in named), missing
    said = bench.rigctl(code=1)
    assert all(name in said for name in named) and "building" not in said


def test_a_dependency_of_a_dependency_is_missed_too(bench: Bench) -> None:
    """Declared in the CMake files of one that is given and takes part in the build."""
    given = bench.content()["dependencies"]
    bench.changes["dependencies"] = {name: given[name] for name in ("repo-mathlib", "repo-shapes")}
    [missing] = plan(bench, code=1)["missing"]
    assert missing.startswith("repo-inner is declared in shapes/CMakeLists.txt and not given")


def test_a_dependency_edited_during_the_build_is_noticed(bench: Bench) -> None:
    bench.small()
    bench.changes["jobs"] = 1
    process = bench.start()
    said = until(process, "[1/")
    header = bench.root / "inner" / "inner.h"
    header.write_text(header.read_text() + "\n// edited\n")
    rest, _ = process.communicate(timeout=300)
    assert process.returncode == 1, "".join(said) + rest
    assert f"{bench.root}/inner was edited while it was built; nothing was installed" in rest and bench.stored() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_command_that_is_ended_ends_its_build(bench: Bench, number: signal.Signals) -> None:
    bench.changes |= {"jobs": 1, "environment": {**bench.content()["environment"], "CCACHE_DISABLE": "1"}}
    process = bench.start()
    until(process, "[2/8]")
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in rest
    assert f"ended by {number.name}; what is built so far stays" in rest
    left = [each for each in psutil.process_iter(["cmdline"]) if str(bench.root) in str(each.info["cmdline"])]
    assert left == [], "orphans would work in the directory of the next build"
    peaks = json.loads((bench.root / MEMOS / "peaks.json").read_text())
    assert len(peaks) >= 2 and all(peak > 10 for peak in peaks.values()), "what it measured is not lost"


def test_a_file_that_needs_more_than_the_build_may_take_is_said_first_and_the_others_are_compiled(bench: Bench) -> None:
    bench.changes |= {"memory_mib": {"csrc/huge.cu": 4000, "default": 400}, "memory_limit": "3000M"}
    bench.changes["environment"] = {**bench.content()["environment"], "CCACHE_DISABLE": "1"}
    assert plan(bench, code=1)["beyond"] == {"csrc/huge.cu": 4000}
    said = bench.rigctl(code=1)
    first, _, after = said.partition("building with")
    assert "csrc/huge.cu needs 4000 MiB, the build may take 3000: every other file is compiled" in first
    assert "huge.cu is too large" in after and "once more" not in after, said
    assert "huge.cu (4000 MiB) needs more than the 3000 MiB that a build may take here (memory_limit 3000M)" in after
    assert bench.compiled_now() == 7, "six, and a note of the seventh"
    bench.changes["memory_limit"] = "85%"
    said = bench.rigctl()
    # And one that includes a header which configuration writes anew.
    assert "going on with 6 objects" in said and bench.receipt()["compiled"] == 2


def test_a_failed_file_is_not_shown_as_done(bench: Bench) -> None:
    bench.changes["jobs"] = 1
    (bench.source / "kernels" / "csrc" / "relu.cu").write_text('#include "not_there.h"\n')
    said = bench.rigctl(code=1)
    assert "relu.cu failed\n" in said and "] relu.cu\n" not in said and "] relu.cu, about" not in said, said
    assert "kernels/csrc/relu.cu does not compile (above)" in said and "not_there.h" in said
    assert bench.compiled_now() <= 4, "nothing was started after it"


def test_a_build_that_was_given_up_leaves_no_directory(bench: Bench) -> None:
    bench.small()
    given_up = bench.root / "kernels" / "work" / "rig-kernel" / ("0" * 16)
    given_up.mkdir(parents=True)
    assert bench.built(1).receipt["cubins"] and not given_up.exists()


def test_the_script_that_renames_wheels_is_not_run_and_what_it_makes_is_the_same_version(
    bench: Bench, tmp_path: Path
) -> None:
    bench.small()
    wheel = bench.built(2).wheel
    assert wheel.name == "rig_kernel-1.2.3-cp310-abi3-linux_x86_64.whl"
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / wheel.name).hardlink_to(wheel)
    subprocess.run([bench.source / "kernels" / "rename_wheels.sh"], cwd=tmp_path, check=True)
    [renamed] = (tmp_path / "dist").iterdir()
    assert "+cu130" in renamed.name
    install.check_version(bench.spec, renamed)


OFFLINE = """
set -e
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
ip link set lo up
ip link add out0 type veth peer name out1
ip address add 10.9.9.1/24 dev out0
ip link set out1 up
ip link set out0 up
ip route add default via 10.9.9.2
ip neighbour add 10.9.9.2 lladdr 02:00:00:00:00:01 dev out0
"$@" && code=0 || code=$?
echo "packets out: $(awk '/out0:/ {print $11}' /proc/net/dev)"
exit $code
"""


def offline(*command: str) -> subprocess.CompletedProcess[str]:
    """Run where every packet that leaves is counted, and none arrives."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "files/hostkit"), "PYTHONUNBUFFERED": "1"}
    argv = ["unshare", "--net", "sh", "-c", OFFLINE, "sh", *command]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_without_a_network_from_a_bundle_and_given_dependencies(bench: Bench) -> None:
    send = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 9))"
    counted = offline(sys.executable, "-c", send)
    assert "packets out: 1" in counted.stdout, counted.stdout + counted.stderr
    bench.small()
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    bundle = bench.root / "source.bundle"
    commit = [*identity, "commit", "-qm", "one"]
    for arguments in (["init", "-q"], ["add", "."], commit, ["bundle", "create", "-q", str(bundle), "HEAD"]):
        subprocess.run(["git", *arguments], cwd=bench.source, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=bench.source, check=True, capture_output=True, text=True)
    source = {"kind": "git", "url": "https://git.invalid/x", "commit": head.stdout.strip(), "mirror": str(bundle)}
    bench.changes |= {"source": source, "libraries": ["rig_kernel/*flash_ops*.so"]}
    bench.builder()  # the toolchain is there; a host gets it from `wheels`
    file = bench.root / "rig-kernel.json"
    file.write_text(json.dumps(bench.content()))
    done = offline(*RIGCTL, "kernel", "plan", str(file))
    assert done.returncode == 0 and "packets out: 0" in done.stdout, done.stdout + done.stderr
    assert "files: 2 to compile" in done.stdout
    done = offline(sys.executable, str(HERE / "stored.py"), str(file), "2")
    assert done.returncode == 0 and "packets out: 0" in done.stdout, done.stdout + done.stderr
    assert [wheel.name for wheel in bench.stored()] == ["rig_kernel-1.2.3-cp310-abi3-linux_x86_64.whl"]


@pytest.mark.parametrize("memory_group", [5500], indirect=True)
def test_files_of_1_to_4_gib_are_compiled_beside_each_other_as_memory_allows(bench: Bench, memory_group: Path) -> None:
    """Both large ones at once would not fit: they take turns, nothing is killed, and small ones go beside them."""
    bench.changes["memory_mib"] = {"heavy.cu": 1600, "huge.cu": 4200, "default": 700}
    code, said = in_group(bench, memory_group, jobs=2)
    assert code == 0 and "killed" not in said, said
    [wheel] = bench.stored()
    receipt = json.loads((wheel.parent / "receipt.json").read_text())
    largest = {name.rpartition("/")[2]: figures["mib"] for name, figures in receipt["largest"].items()}
    assert receipt["attempts"] == 1 and largest["huge.cu"] > 2500 > largest["heavy.cu"] > 900, largest
