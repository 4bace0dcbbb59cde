"""rigctl kernel: what needs no compiler. The builds are in tests/kernel."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyinfra.api.connect import connect_all, disconnect_all
from pyinfra.api.operation import add_op

from rig.artifacts.kernel_orders import kernel_files, kernel_job, kernel_job_path, toolkit
from rig.artifacts.rollback_states import state_of
from rig.artifacts.units import unit_file
from rig.catalog.entries import Kernel, Toolchain, load_catalog
from rig.catalog.yaml_source import CatalogError
from rig.host.settings import HostSettings
from rig.operations.common import PLAN_LOG
from rig.operations.kernel_wheels import kernel as kernel_operation
from rig.plan.host_plan import HostData, HostPlan, _environment, host_plan, kernel_packages
from rigctl import builder, cli
from rigctl.contract import layout
from rigctl.contract.kernel_job import KernelJob
from rigctl.errors import RigctlError
from rigctl.kernel import build, commands, cubins, install, memory, requirements, source, steps, store, toolchain
from rigctl.kernel.compile_job import DEFAULT_MIB, Known, Running, State, fits
from tests.support.plans import data
from tests.unit.test_operations import local_state
from tests.unit.wheelhouse import wheel as make_wheel


def order(root: Path, **more: Any) -> dict[str, Any]:
    return {
        "format": 1,
        "mode": "source",
        "engine": {
            "path": str(root / "env" / "engine" / "e1"),
            "python": "3.11",
            "lock": str(root / "lock.txt"),
        },
        "package": "rig-kernel",
        "module": "rig_kernel",
        "libraries": ["rig_kernel/sm100/*.so"],
        "toolchain": {"path": str(root / "env" / "toolchain" / "t"), "lock": str(root / "tools.txt")},
        "root": str(root / "env" / "kernels"),
        "source": {"kind": "directory", "path": str(root / "source")},
        "architectures": ["12.0"],
        **more,
    }


def spec(root: Path, **more: Any) -> KernelJob:
    return KernelJob.parse(order(root, **more), "test")


# Data


@pytest.fixture
def plan() -> HostPlan:
    return host_plan(data("gpu"), "ubuntu-24.04", HostSettings())


def test_every_specification_of_the_catalogue_is_one_for_rigctl(plan: HostPlan) -> None:
    files = kernel_files(plan)
    names = ("sglang-0.5.9", "sglang-0.5.23")
    parsed = {name: KernelJob.parse_text(files[kernel_job_path(name)], name) for name in names}
    assert parsed["sglang-0.5.9"].mode == "source" and parsed["sglang-0.5.23"].mode == "wheel"
    assert parsed["sglang-0.5.9"].source is not None and parsed["sglang-0.5.9"].source.kind == "git"
    assert all(str(each.toolchain.lock) in files for each in parsed.values())
    for name, each in parsed.items():
        package = plan.environments[name].release.kernel
        assert package is not None and f"{package.package}==" in Path(plan.environments[name].lock).read_text()
        assert each.engine.path == Path(plan.environments[name].path)


def test_engines_that_compile_while_they_serve_get_the_toolkit_of_their_release(plan: HostPlan) -> None:
    home = toolkit(plan, "sglang-0.5.23")
    assert home is not None and f"CUDA_HOME={home}" in unit_file(plan, "sglang-base-current")
    assert toolkit(plan, "vllm-0.33.0") is None and "CUDA_HOME" not in unit_file(plan, "vllm-base-current")


def test_a_state_to_return_to_has_the_kernels_too(plan: HostPlan) -> None:
    state = json.loads(json.dumps(state_of(plan)))
    library = state["kernels"]["sglang-0.5.9"]
    assert Kernel.model_validate(library["kernel"]) == plan.environments["sglang-0.5.9"].release.kernel
    assert state["kernel_files"][library["description"]] == kernel_files(plan)[library["description"]].decode()
    assert state["items"]["kernel/sglang-0.5.9"]["specification"] == library["digest"]


def test_compilers_are_installed_where_a_release_has_a_kernel(plan: HostPlan) -> None:
    releases = load_catalog().releases
    assert kernel_packages(releases["vllm-0.33.0"]) == []
    assert kernel_packages(releases["sglang-0.5.23"]) == ["g++"]
    assert {"g++", "ccache", "git"} <= set(plan.packages)
    release = releases["sglang-0.5.9"]
    assert release.kernel is not None
    kernel = release.kernel.model_copy(update={"system_packages": ["libnuma-dev"]})
    assert "libnuma-dev" in kernel_packages(release.model_copy(update={"kernel": kernel}))


def test_a_specification_changes_with_the_data(plan: HostPlan) -> None:
    kernel = plan.environments["sglang-0.5.9"].release.kernel
    assert isinstance(kernel, Kernel)
    assert kernel_job(plan, "sglang-0.5.9").defines == kernel.defines


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moode": "source"}, 'moode: there is no such key, did you mean "mode"'),
        ({"source": None}, "mode source needs a source"),
        ({"toolchain": {"path": "/x"}}, "toolchain.lock: is missing"),
        ({"source": {"kind": "git", "branch": "main"}}, "source.branch: there is no such key"),
    ],
)
def test_wrong_specifications_are_named(tmp_path: Path, change: Mapping[str, Any], message: str) -> None:
    with pytest.raises(RigctlError, match=rf"test: .*{message}"):
        spec(tmp_path, **change)


# Architectures and proof


@pytest.mark.parametrize(("capability", "name"), [("12.0", "120a"), ("9.0", "90a"), ("10.3", "103a"), ("8.9", "89")])
def test_architecture_of_a_capability(capability: str, name: str) -> None:
    assert cubins.architecture(capability) == name


def test_wrong_capability() -> None:
    with pytest.raises(RigctlError, match="'sm_120' is no compute capability"):
        cubins.architecture("sm_120")


def test_capability_is_read_from_the_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubins, "nvidia_smi", lambda query: [["9.0"], ["9.0"]])
    assert cubins.wanted([]) == ["90a"]
    monkeypatch.setattr(cubins, "nvidia_smi", lambda query: [])
    with pytest.raises(RigctlError, match="no GPU of this host tells its compute capability"):
        cubins.wanted([])


ONE = {"rig/sm100/ops.so": {"sm_120a": 4}, "rig/plain.so": {}}


@pytest.mark.parametrize(
    ("held", "only", "expected"),
    [
        (ONE, True, []),
        ({"a/ops.so": {}}, True, ["none of its 1 libraries holds device code"]),
        ({}, True, ["none of its 0 libraries holds device code"]),
        ({**ONE, "rig/fa.so": {"sm_90a": 2}}, True, ["rig/fa.so holds 2 x sm_90a; sm_90a is not wanted"]),
        ({**ONE, "rig/fa.so": {"sm_90a": 2}}, False, []),
        ({"rig/other.so": {"sm_120a": 1}}, True, ["no library is rig/sm100/*.so (there are: rig/other.so)"]),
        (
            {"rig/sm100/ops.so": {"sm_120": 1}, "rig/x.so": {"sm_120a": 1}},
            False,
            ["rig/sm100/ops.so holds 1 x sm_120, nothing for sm_120a"],
        ),
    ],
)
def test_what_libraries_hold_is_the_proof(held: cubins.Cubins, only: bool, expected: list[str]) -> None:
    assert list(cubins.objections(held, ["120a"], ["rig/sm100/*.so"], only=only)) == expected


def test_cuobjdump_is_read(tmp_path: Path) -> None:
    program, library = tmp_path / "cuobjdump", tmp_path / "lib.so"
    library.touch()
    lines = ("ELF file    1: lib.1.sm_120a.cubin", "ELF file   12: lib.12.sm_90.cubin")
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)
    assert cubins.of_library(library, program) == {"sm_120a": 1, "sm_90": 1}
    program.write_text("#!/bin/sh\necho 'cuobjdump info: File does not contain device code'; exit 255\n")
    assert cubins.of_library(library, program) == {}
    program.write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    with pytest.raises(RigctlError, match=r"cuobjdump cannot read .*: broken"):
        cubins.of_library(library, program)


# Toolchain


@pytest.mark.parametrize(
    ("nvcc", "gcc", "newest", "torch", "message"),
    [
        ("13.0.88", "12.2.0", 15, "13.0", None),
        ("12.9.86", "13.3.0", 14, "12.8", None),
        ("12.6.20", "12.2.0", 13, "12.8", "nvcc 12.6.20 is older than 12.8"),
        ("13.0.88", "16.1.0", 15, "13.0", "gcc 16.1.0 is newer than 15"),
        ("13.0.88", "12.2.0", 15, "12.8", "torch is made for CUDA 12.8, the toolkit is 13.0.88"),
        ("13.0.88", "12.2.0", None, None, None),
    ],
)
def test_what_goes_together(nvcc: str, gcc: str, newest: int | None, torch: str | None, message: str | None) -> None:
    found = toolchain.unfit(nvcc, gcc, newest, torch, "12.8")
    assert found is None if message is None else found and found.startswith(message)


def test_nvcc_and_gcc_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = spec(tmp_path)
    cuda, site = toolchain.cuda_root(wanted), tmp_path / "env/engine/e1/lib/python3.11/site-packages"
    (site / "torch-2.9.1.dist-info").mkdir(parents=True)
    (site / "torch").mkdir()
    (site / "torch" / "version.py").write_text("__version__ = '2.9.1'\ncuda: Optional[str] = '12.8'\n")
    (cuda / "include" / "crt").mkdir(parents=True)
    (cuda / "include" / "crt" / "host_config.h").write_text("#if __GNUC__ > 14\n#error\n#endif\n")
    program(cuda / "bin" / "nvcc", "echo 'Cuda compilation tools, release 12.6, V12.6.20'")
    program(tmp_path / "bin" / "g++", "echo 15.1.0")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    with pytest.raises(RigctlError, match=r"cannot be built here: nvcc 12.6.20 is older than 12.8"):
        toolchain.examine(wanted)
    program(cuda / "bin" / "nvcc", "echo 'Cuda compilation tools, release 12.9, V12.9.86'")
    with pytest.raises(RigctlError, match=r"cannot be built here: gcc 15.1.0 is newer than 14.*install g\+\+-14"):
        toolchain.examine(wanted)
    program(tmp_path / "bin" / "g++", "echo 13.3.0")
    assert toolchain.examine(wanted).versions["torch"] == "2.9.1"


def program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_toolkit_of_links_puts_the_compiler_first(tmp_path: Path) -> None:
    wanted = spec(tmp_path)
    tools = tmp_path / "env/toolchain/t/lib/python3.11/site-packages/nvidia/cu13"
    engine = tmp_path / "env/engine/e1/lib/python3.11/site-packages/nvidia"
    for path, text in {
        tools / "bin/nvcc": "13.0",
        tools / "include/cuda.h": "13.0",
        engine / "cu13/bin/nvcc": "13.5",
        engine / "cu13/include/cuda.h": "13.5",
        engine / "cu13/include/cublas.h": "engine",
        engine / "cu13/lib/libcublas.so.13": "engine",
        engine / "cublas/include/old.h": "one directory a library, as in CUDA 12",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    root = toolchain.cuda_root(wanted)
    toolchain._merge(root, list(toolchain._origins(wanted)))
    assert (root / "bin/nvcc").read_text() == (root / "include/cuda.h").read_text() == "13.0"
    assert (root / "include/cublas.h").read_text() == "engine" and (root / "include/old.h").exists()
    assert (root / "lib64/libcublas.so").read_text() == "engine"
    assert (root / "lib64/stubs/libcuda.so.1").exists()


# Memory


def test_a_job_waits_for_what_others_may_still_grow_to() -> None:
    assert fits(20000, [], 100, 1), "one always runs"
    assert fits(4000, [Running(9000, 8000)], 6000, 2)
    assert not fits(4000, [Running(9000, 8000)], 60000, 1), "one compiler at once"
    assert not fits(4000, [Running(9000, 1000)], 10000, 2)
    assert not fits(4000, [Running(9000, 9500)], 4100, 2), "a reserve stays"


def test_needs_are_found_by_the_longest_path() -> None:
    needs = {"default": 1, "kernel.cu": 2, "gemm/kernel.cu": 3}
    files = ("a.cu", "moe/kernel.cu", "gemm/kernel.cu", "xkernel.cu")
    assert [Known(needs).need(f"/src/{name}") for name in files] == [1, 2, 3, 1]


def test_the_larger_of_what_is_stated_and_measured_counts() -> None:
    known = Known({"default": 100, "gemm/fp8.cu": 2000, "moe.cu": 500}, {"fp8.cu": 9000, "moe.cu": 40, "x.cu": 7})
    files = {"gemm/fp8.cu": 9000, "moe.cu": 500, "x.cu": 7, "unknown.cu": 100}
    assert {name: known.need(f"/src/{name}") for name in files} == files
    assert Known({}, {}).need("x.cu") == DEFAULT_MIB
    assert (known := Known({"a.cu": 12}, {"b.cu": 11, "c.cu": 3}, limit=10)).named == ["a.cu", "b.cu", "c.cu"]
    assert known.beyond(known.named) == {"a.cu": 12, "b.cu": 11}


def test_jobs_follow_memory_and_cores(tmp_path: Path) -> None:
    wanted = spec(tmp_path)
    assert build.jobs_for(wanted, 64, 200_000, serving=False) == 64
    assert build.jobs_for(wanted, 64, 8192, serving=False) == 4
    assert build.jobs_for(wanted, 64, 200_000, serving=True) == 16
    assert build.jobs_for(wanted, 2, 100, serving=True) == 1
    assert build.jobs_for(spec(tmp_path, jobs=3), 64, 200_000, serving=False) == 3


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_memory_that_is_left_is_that_of_the_narrowest_group(tmp_path: Path, version: str) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 12582912 kB\nMemAvailable:   8388608 kB\n")
    if version == "v2":
        (proc / "self" / "cgroup").write_text("0::/system.slice/job.service\n")
        group = groups / "system.slice" / "job.service"
        names = {
            "memory.max": "4294967296",
            "memory.current": "3221225472",
            "memory.stat": "inactive_file 1073741824\n",
        }
        names["memory.events"] = "low 0\noom 2\noom_kill 2\n"
    else:
        (proc / "self" / "cgroup").write_text("7:cpu:/x\n5:memory:/job\n")
        group = groups / "memory" / "job"
        names = {"memory.limit_in_bytes": "4294967296", "memory.usage_in_bytes": "3221225472"}
        names["memory.stat"] = "total_inactive_file 1073741824\n"
        names["memory.oom_control"] = "oom_kill_disable 0\noom_kill 2\n"
    group.mkdir(parents=True)
    for name, text in names.items():
        (group / name).write_text(text)
    assert memory.available(proc, groups) == 2048
    assert memory.killed(proc, groups) == 2
    assert memory.budget("50%", proc, groups) == 4096
    assert memory.budget("25%", proc, groups) == 3072 and memory.budget("1G", proc, groups) == 1024
    (group / next(iter(names))).write_text("max" if version == "v2" else str(1 << 62))
    assert memory.available(proc, groups) == 8192


def launch(state: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KIMI_RIG_COMPILE_STATE": str(state), "PYTHONPATH": "files/hostkit"}
    argv = [sys.executable, "-m", "rigctl.kernel.compile_job", *command]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


def test_the_launcher_notes_what_a_compiler_took(tmp_path: Path) -> None:
    state = State(tmp_path / "state")
    code = "import sys, time; b = bytearray(200 << 20); time.sleep(0.6); print('said', file=sys.stderr); sys.exit(3)"
    done = launch(state.root, sys.executable, "-c", code, "x.cu")
    assert (done.returncode, done.stderr) == (3, "said\n")
    [entry] = [json.loads(line) for line in state.log.read_text().splitlines()]
    assert (
        entry["source"] == str(Path("x.cu").absolute())
        and entry["code"] == 3
        and not entry["killed"]
        and 200 <= entry["peak"] < 400
    )
    assert state.running() == []


def test_the_launcher_knows_a_killed_compiler(tmp_path: Path) -> None:
    state = State(tmp_path / "state")
    assert launch(state.root, "sh", "-c", "kill -9 $$", "x.cu").returncode == 137
    assert launch(state.root, "sh", "-c", "echo \"'cicc' died due to signal 9\" >&2; exit 9", "y.cu").returncode == 9
    assert [json.loads(line)["killed"] for line in state.log.read_text().splitlines()] == [True, True]


def ended(state: State) -> list[dict[str, Any]]:
    """What the launcher noted of each file."""
    return [json.loads(line) for line in state.log.read_text().splitlines()]


def test_a_kill_raises_what_a_file_is_known_to_need(tmp_path: Path) -> None:
    """Killed early it held little, which says nothing: neither the default nor what was stated falls."""
    state = State(tmp_path / "state")
    state.begin(Known({"y.cu": 5000}))
    for name in ("x.cu", "y.cu"):
        launch(state.root, "sh", "-c", "kill -9 $$", name)
    assert [each["need"] for each in ended(state)] == [DEFAULT_MIB, 5000]
    assert not state.failed.exists(), "the others are compiled"
    state.begin(Known({"z.cu": 1}, limit=100))
    (state.jobs / "1").write_text("1 0")  # another one beside it
    code = "import os, time; b = bytearray(200 << 20); time.sleep(0.6); os.kill(os.getpid(), 9)"
    launch(state.root, sys.executable, "-c", code, "z.cu")
    assert ended(state)[-1]["need"] == 100, "it may fit when it runs alone"


def test_a_file_that_does_not_compile_or_was_stopped_teaches_nothing(tmp_path: Path) -> None:
    state = State(tmp_path / "state")
    state.begin(Known())
    launch(state.root, "sh", "-c", "exit 1", "x.cu")
    launch(state.root, "sh", "-c", "exit 0", "y.cu")
    [failed] = ended(state)
    assert "need" not in failed and state.failed.exists(), "y.cu was not started after it"


def test_a_file_above_the_limit_is_not_started(tmp_path: Path) -> None:
    state = State(tmp_path / "state")
    state.begin(Known({"x.cu": 5000}, limit=4000))
    done = launch(state.root, "sh", "-c", f"touch {tmp_path}/started", "x.cu")
    assert done.returncode == 1 and "x.cu needs 5000 MiB, the build may take 4000: not compiled" in done.stderr
    assert not (tmp_path / "started").exists() and not state.failed.exists()
    assert [each["too_large"] for each in ended(state)] == [5000]


def test_a_small_file_is_compiled_beside_a_large_one_while_another_large_one_waits(tmp_path: Path) -> None:
    state = State(tmp_path / "state")
    state.begin(Known({"large.cu": 100, "second.cu": 10**8, "small.cu": 1}, jobs=2))
    environment = {**os.environ, "KIMI_RIG_COMPILE_STATE": str(state.root), "PYTHONPATH": "files/hostkit"}

    def start(name: str, script: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "rigctl.kernel.compile_job", "sh", "-c", script, name]
        return subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE)

    def until_there(path: Path) -> None:
        end = time.monotonic() + 30
        while not path.exists() or not any(path.iterdir()):
            assert time.monotonic() < end, path
            time.sleep(0.05)

    large = start("large.cu", "read line")
    until_there(state.jobs)
    second = start("second.cu", "true")
    until_there(state.waiting)
    try:
        assert start("small.cu", "true").wait(timeout=30) == 0, "it waits behind one that does not fit"
        assert second.poll() is None
    finally:
        large.communicate(b"\n", timeout=30)
        assert second.wait(timeout=30) == 0
    assert [Path(each["source"]).name for each in ended(state)] == ["small.cu", "large.cu", "second.cu"]


def test_who_has_waited_for_long_is_passed_by_nobody(tmp_path: Path) -> None:
    state = State(tmp_path / "state")
    patient, mine = state.waiting / str(os.getppid()), state.waiting / str(os.getpid())
    patient.write_text(str(10**8))
    mine.write_text("1")
    state.note(1, 0)
    (state.jobs / str(os.getpid())).rename(state.jobs / "1")  # another one at work
    os.utime(patient, (1, time.time() - 10))
    assert state._admit(1, 4, mine)
    (state.jobs / str(os.getpid())).unlink()
    os.utime(patient, (1, 1))
    assert not state._admit(1, 4, mine)


ENDED = """
import subprocess, sys, time
from rigctl.kernel.children import end_with_us
with end_with_us():
    # A child that ends and leaves one behind, which does not end when asked to.
    subprocess.run(["sh", "-c", "trap '' TERM; (trap '' TERM; exec sleep 321) & exit 0"])
    print("up", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_every_descendant(number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": "files/hostkit"}
    # The run itself may ignore them: under nohup, or as a job in the background.
    heard = "import signal; [signal.signal(each, signal.SIG_DFL) for each in (1, 2, 15)]; "
    code = heard + "import rigctl.kernel.children as c; c.GRACE_SECONDS = 0.5" + ENDED
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        [left] = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + number and said == f"ended by {number.name}; what is built so far stays\n"
    assert not left.is_running()


def test_a_killed_launcher_is_forgotten(tmp_path: Path) -> None:
    state = State(tmp_path / "state")
    gone = subprocess.Popen(["true"])
    gone.wait()
    (state.jobs / str(gone.pid)).write_text("9000 10")
    assert state.running() == []
    state.note(500, 0)
    assert state.running() == [Running(500, 0)]


def test_a_number_that_another_user_has_by_now_is_no_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(_: int, __: int) -> None:
        raise PermissionError

    state = State(tmp_path / "state")
    (state.jobs / "4711").write_text("9000 0")
    monkeypatch.setattr(os, "kill", kill)
    assert state.running() == [] and not (state.jobs / "4711").exists()


def test_a_job_is_measured_when_another_asks(tmp_path: Path) -> None:
    state = State(tmp_path / "state")
    steps = ("import sys", "b = bytearray(200 << 20)", "print(flush=True)", "sys.stdin.read(1)", "del b")
    code = "; ".join([*steps, "print(flush=True)", "sys.stdin.read()"])
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as compiler:
        assert compiler.stdin and compiler.stdout
        state.note(500, compiler.pid)
        compiler.stdout.readline()
        assert 200 <= state.running()[0].now < 300
        compiler.stdin.write(b"x")
        compiler.stdin.flush()
        compiler.stdout.readline()
        assert state.running()[0].now < 100, "what it gave back it may take again"
        compiler.stdin.close()


def test_a_build_is_refused_beside_a_serving_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units = ("kimi-vllm-base.service", "kimi-job-kernel-x.service", "kimi-acs.service")
    program(tmp_path / "bin" / "systemctl", "\n".join(f"echo '{unit} loaded active running'" for unit in units))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    with pytest.raises(RigctlError, match=r"^kimi-vllm-base.service serves: a build would slow it down"):
        commands._built(spec(tmp_path), build.Inputs({}))


# Progress


def test_progress_line() -> None:
    step = "Building CUDA object CMakeFiles/ops.dir/csrc/gemm/fp8.cu.o"
    assert build.progress(37, 62, 48, step) == "[37/62] fp8.cu, about 20 min left"
    assert build.progress(1, 62, None, step) == "[1/62] fp8.cu", "what a cache answers says nothing of the rest"
    assert build.progress(3, 4, 10, "/usr/bin/ccache nvcc -O3 -c /s/csrc/a.cu -o a.o") == "[3/4] a.cu, about 10 s left"
    assert build.progress(62, 62, 15, "Linking CXX shared module x.so") == "[62/62] Linking CXX shared module x.so"


# Source


def tree(root: Path) -> Path:
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "pyproject.toml").write_text("[project]\n")
    (root / "a.cu").write_text("one")
    return root


def test_the_digest_of_a_tree_is_its_content(tmp_path: Path) -> None:
    one, memo = tree(tmp_path / "one"), tmp_path / "memo.json"
    first = source.tree_digest(one, memo)
    assert source.tree_digest(tree(tmp_path / "two")) == first == source.tree_digest(one, memo)
    (one / ".git").mkdir()
    (one / ".git" / "HEAD").write_text("x")
    assert source.tree_digest(one, memo) == first
    (one / "a.cu").write_text("two")
    assert source.tree_digest(one, memo) != first, "a remembered digest counts only while nothing was touched"


def test_a_copy_is_whole_and_another_state_is_noticed(tmp_path: Path) -> None:
    wanted, memos = spec(tmp_path, subdirectory="sub"), tmp_path / "memos"
    tree(tmp_path / "source")
    identity = source.identity(wanted, memos)
    (tmp_path / "source" / "a.cu").write_text("edited meanwhile")
    with pytest.raises(RigctlError, match="was edited while it was copied"):
        source.take(wanted, tmp_path / "work" / "source", identity, memos)
    assert not (tmp_path / "work" / "source").exists()
    source.take(wanted, tmp_path / "work" / "source", source.identity(wanted, memos), memos)
    assert (tmp_path / "work" / "source" / "a.cu").read_text() == "edited meanwhile"


def test_a_copy_leaves_out_version_control_and_keeps_links(tmp_path: Path) -> None:
    one = tree(tmp_path / "one")
    (one / ".git").mkdir()
    (one / "link").symlink_to("a.cu")
    (one / "dangling").symlink_to("nowhere")
    source.copy(one, tmp_path / "two")
    assert not (tmp_path / "two" / ".git").exists() and (tmp_path / "two" / "link").readlink() == Path("a.cu")
    assert source.tree_digest(tmp_path / "two") == source.tree_digest(one)
    with pytest.raises(RigctlError, match=r"could not be copied to .*: No such file or directory"):
        source.copy(tmp_path / "gone", tmp_path / "three")
    assert not (tmp_path / "three").exists()


def test_what_a_link_out_of_a_tree_leads_to_is_a_part_of_it(tmp_path: Path) -> None:
    """A dependency in the place of a submodule, linked: its edit is another source, and a copy still finds it."""
    one, beside = tree(tmp_path / "one"), tree(tmp_path / "beside")
    (one / "ext").symlink_to("../beside")
    (one / "b.h").symlink_to("../beside/a.cu")
    for round_, target in enumerate(("..", "here", "ext/back", "/nowhere")):  # in circles, upwards, nowhere
        (one / f"odd{round_}").symlink_to(target)
    (one / "here").symlink_to("here")
    (beside / "back").symlink_to("../one")
    memo = tmp_path / "memo.json"
    first = source.tree_digest(one, memo)
    assert source.tree_digest(one, memo) == first
    source.copy(one, tmp_path / "elsewhere" / "copy")
    assert (tmp_path / "elsewhere" / "copy" / "b.h").read_text() == "one"
    assert (tmp_path / "elsewhere" / "copy" / "ext" / "a.cu").read_text() == "one"
    (beside / "a.cu").write_text("two")
    assert source.tree_digest(one, memo) != first


def test_an_edit_that_keeps_size_and_time_is_an_edit(tmp_path: Path) -> None:
    one, memo = tree(tmp_path / "one"), tmp_path / "memo.json"
    first, before = source.tree_digest(one, memo), (one / "a.cu").stat()
    (tmp_path / "second-name").hardlink_to(one / "a.cu")
    (tmp_path / "second-name").write_text("two")
    os.utime(one / "a.cu", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert source.tree_digest(one, memo) != first


def test_a_copy_of_a_read_only_tree_can_be_patched_written_and_removed(tmp_path: Path) -> None:
    one, inner = tree(tmp_path / "one"), tree(tmp_path / "inner")
    (one / "ext").mkdir()
    (one / "ext" / "inner").symlink_to(tmp_path / "theirs")
    tree(tmp_path / "theirs")
    for folder in (one, one / "ext", inner):
        (folder / "file").write_text("x")
        (folder / "file").chmod(0o444)
        folder.chmod(0o555)
    copy = tmp_path / "copy"
    source.copy(one, copy, {"ext/inner": inner})
    modes = {path.stat().st_mode & 0o700 for path in (copy, copy / "ext", copy / "ext/inner")}
    assert modes == {0o700} and (copy / "ext/inner/file").stat().st_mode & 0o600 == 0o600
    assert not (copy / "ext/inner").is_symlink() and not (tmp_path / "theirs" / "file").exists()
    copy.chmod(0o555)
    source.remove(copy)
    source.remove(copy)
    assert not copy.exists() and (one / "file").stat().st_mode & 0o777 == 0o444


def test_odd_files_of_a_tree_end_nothing_without_a_word(tmp_path: Path) -> None:
    """Names that are no UTF-8 are read; a pipe, which would be read for ever, is named."""
    one = tree(tmp_path / "one")
    Path(os.fsdecode(os.fsencode(one) + b"/\xff.cu")).touch()
    (one / "sub").mkdir(exist_ok=True)
    (one / "sub" / "gone.cmake").symlink_to("nowhere")
    (one / "sub" / "CMakeLists.txt").mkdir()
    assert source.tree_digest(one) != source.tree_digest(tree(tmp_path / "two"))
    assert requirements.fetched(spec(tmp_path, subdirectory="sub"), one) == {}
    os.mkfifo(one / "pipe")
    with pytest.raises(RigctlError, match="one/pipe is neither file, directory nor link"):
        source.tree_digest(one)


def test_a_full_disk_ends_a_step_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: KernelJob, __: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/builds/memo.json")

    monkeypatch.setattr(steps, "STEPS", {"inputs": full})
    monkeypatch.setattr(steps, "end_with_us", nullcontext)
    monkeypatch.setattr(builder, "inside", lambda: None)
    monkeypatch.setattr(sys, "argv", ["steps", "inputs"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"order": order(tmp_path), "given": None})))
    assert steps.main() == 1
    said = capsys.readouterr().out
    assert said.startswith(steps.RESULT) and "/builds/memo.json: No space left on device" in said


def test_a_source_whose_patching_was_killed_is_taken_anew(tmp_path: Path) -> None:
    tree(tmp_path / "source")
    series = tmp_path / "series"
    series.mkdir()
    for number, (old, new) in enumerate((("one", "two"), ("two", "three"))):
        end = "\\ No newline at end of file\n"
        text = f"--- a/a.cu\n+++ b/a.cu\n@@ -1 +1 @@\n-{old}\n{end}+{new}\n{end}"
        (series / f"{number}.patch").write_text(text)
    wanted = spec(tmp_path, subdirectory="sub", patches=str(series), minimum_disk_mib=0)
    wanted.root.mkdir(parents=True)
    chain = toolchain.Toolchain(tmp_path, tmp_path, tmp_path, {"torch": "2"})
    made = build.Build(wanted, chain, build.gather(wanted, chain))
    made.take()
    assert (made.source / "a.cu").read_text() == "three"
    (made.source / "a.cu").write_text("two")
    (made.source / source.PATCHED).unlink()
    made.take()
    assert (made.source / "a.cu").read_text() == "three"


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RigctlError, match=r"no pyproject.toml there: put the source of rig-kernel at"):
        build.gather(spec(tmp_path), toolchain.Toolchain(tmp_path, tmp_path, tmp_path, {}))


def test_a_dependency_that_is_not_there(tmp_path: Path) -> None:
    absent = {"repo-cutlass": {"path": str(tmp_path / "cutlass")}}
    tree(tmp_path / "source")
    chain = toolchain.Toolchain(tmp_path, tmp_path, tmp_path, {"torch": "2"})
    with pytest.raises(RigctlError, match="cutlass: not there; it is dependency repo-cutlass of rig-kernel"):
        build.gather(spec(tmp_path, subdirectory="sub", dependencies=absent), chain)


def test_a_tree_within_a_dependency_is_a_part_of_its_copy_alone(tmp_path: Path) -> None:
    outer, inner = tree(tmp_path / "outer"), tree(tmp_path / "inner")
    (outer / "ext" / "inner").mkdir(parents=True)  # as git leaves the place of a submodule
    source.copy(outer, tmp_path / "copy", {"ext/inner": inner})
    assert (tmp_path / "copy/ext/inner/a.cu").read_text() == "one" and not any((outer / "ext/inner").iterdir())


def test_what_cmake_would_fetch_is_read_from_the_project_and_what_it_enters(tmp_path: Path) -> None:
    project = "FetchContent_Declare(\n  Repo-One GIT_TAG x)\nfetchcontent_makeavailable(repo-one)\n"
    project += "# FetchContent_Declare(commented)\nadd_subdirectory(${two_SOURCE_DIR} two)\n"
    for name, text in {
        "source/sub/CMakeLists.txt": project,
        "source/sub/cmake/more.cmake": "FetchContent_Declare(two URL y)\nFetchContent_Declare(three URL y)",
        "source/beside/CMakeLists.txt": "FetchContent_Declare(beside URL y)",
        "one/CMakeLists.txt": "FetchContent_Declare(below-one URL z)",
        "two/CMakeLists.txt": "FetchContent_Declare(below-two URL z)",
        "three/CMakeLists.txt": "FetchContent_Declare(of-its-tests URL z)",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    paths = {"repo-one": "one", "two": "two", "three": "three"}
    given = {name: {"path": str(tmp_path / path)} for name, path in paths.items()}
    job = spec(tmp_path, subdirectory="sub", dependencies=given)
    found = requirements.fetched(job, tmp_path / "source")
    assert found == {"below-one": "one/CMakeLists.txt", "below-two": "two/CMakeLists.txt"}
    assert list(requirements.undeclared(job, tmp_path / "source")) == [], "CMake may fetch it"
    offline = {"defines": {"FETCHCONTENT_FULLY_DISCONNECTED": "on"}, "unused_dependencies": ["below-two"]}
    job = spec(tmp_path, subdirectory="sub", dependencies=given, **offline)
    [missing] = requirements.undeclared(job, tmp_path / "source")
    assert missing.startswith("below-one is declared in one/CMakeLists.txt and not given")
    nothing = requirements.fetched(spec(tmp_path, subdirectory="sub"), tmp_path / "source")
    assert list(nothing) == ["Repo-One", "two", "three"]


def git(*arguments: str, at: Path) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always"]
    done = subprocess.run(["git", *identity, *arguments], cwd=at, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, str, str]:
    """A repository with a submodule, and two commits of it."""
    part, main = tree(tmp_path / "part"), tree(tmp_path / "main")
    for each in (part, main):
        git("init", "-q", at=each)
        git("add", ".", at=each)
        git("commit", "-qm", "one", at=each)
    git("submodule", "--quiet", "add", str(part), "part", at=main)
    git("commit", "-qam", "with a part", at=main)
    first = git("rev-parse", "HEAD", at=main)
    (main / "a.cu").write_text("later")
    git("commit", "-qam", "two", at=main)
    return main, first, git("rev-parse", "HEAD", at=main)


def test_a_commit_is_fetched_alone_with_its_submodules(tmp_path: Path, repository: tuple[Path, str, str]) -> None:
    main, first, _ = repository
    wanted = spec(tmp_path, source={"kind": "git", "url": str(main), "commit": first, "submodules": True})
    target = tmp_path / "work" / "source"
    source.take(wanted, target, source.identity(wanted, tmp_path / "memos"), tmp_path / "memos")
    assert (target / "a.cu").read_text() == "one" and (target / "part" / "a.cu").read_text() == "one"
    assert git("rev-list", "--count", "--all", at=target) in ("0", "1"), "nothing but the commit"


def test_a_bundle_serves_a_host_without_network(tmp_path: Path, repository: tuple[Path, str, str]) -> None:
    main, first, _ = repository
    git("bundle", "create", "-q", str(tmp_path / "all.bundle"), "--all", at=main)
    bundle = str(tmp_path / "all.bundle")
    asked = {"kind": "git", "url": "https://unreachable.invalid/x", "commit": first, "mirror": bundle}
    source.take(spec(tmp_path, source=asked), tmp_path / "work" / "source", f"git:{first}", tmp_path / "memos")
    assert (tmp_path / "work" / "source" / "a.cu").read_text() == "one"


def test_a_wrong_commit_is_named(tmp_path: Path, repository: tuple[Path, str, str]) -> None:
    main, first, _ = repository
    wrong = "0" * 39 + "1"
    with pytest.raises(RigctlError, match=f"commit {wrong} could not be fetched .*correct the kernel's commit"):
        asked = {"kind": "git", "url": str(main), "commit": wrong}
        source.take(spec(tmp_path, source=asked), tmp_path / "w", "", tmp_path / "memos")
    assert not (tmp_path / "w").exists()
    with pytest.raises(RigctlError, match=r"source.commit: a branch or tag is a moving name: pin the commit"):
        spec(tmp_path, source={"kind": "git", "url": str(main), "commit": first[:10]})


def test_patches_apply_once_or_are_named(tmp_path: Path) -> None:
    root, series = tree(tmp_path / "root"), tmp_path / "series"
    series.mkdir()
    (series / "1.patch").write_text(
        "--- a/a.cu\n+++ b/a.cu\n@@ -1 +1 @@\n-one\n\\ No newline at end of file\n+patched\n"
    )
    source.apply_patches(series, root)
    source.apply_patches(series, root)
    assert (root / "a.cu").read_text() == "patched\n"
    other = tree(tmp_path / "other")
    (other / "a.cu").write_text("nothing like it")
    with pytest.raises(RigctlError, match=r"1.patch does not apply to the source"):
        source.apply_patches(series, other)


# The stage


@pytest.fixture
def rigctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A rigctl that says what the file beside it holds."""
    monkeypatch.setattr(layout, "RIGCTL", str(tmp_path / "rigctl"))
    program(tmp_path / "rigctl", f"cat {tmp_path}/state")
    monkeypatch.setenv(PLAN_LOG, str(tmp_path / "plan"))
    return tmp_path / "state"


def planned(rigctl: Path, plan: HostPlan, state: str, digest: str = "", on_host: str = "") -> list[str]:
    """What a plan says of the kernel of SGLang 0.5.9 when `rigctl kernel status` says `state`.

    on_host: the order that lies there, else that of the plan. digest: of what is wanted, else of the plan's.
    """
    path = rigctl.with_name("job.json")
    path.write_text(on_host or kernel_job(plan, "sglang-0.5.9").text())
    rigctl.write_text(state)
    log = rigctl.with_name("plan")
    log.unlink(missing_ok=True)
    wanted = plan.environments["sglang-0.5.9"].release.kernel
    running = local_state()
    connect_all(running)
    try:
        wanted_digest = digest or kernel_job(plan, "sglang-0.5.9").digest
        more = {"path": str(path), "digest": wanted_digest, "trees": ["/nowhere"]}
        add_op(running, kernel_operation, release="sglang-0.5.9", wanted=wanted, **more)
    finally:
        disconnect_all(running)
    entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [each.get("detail") or each.get("notice") for each in entries]


def test_what_a_plan_says_of_a_kernel(plan: HostPlan, rigctl: Path) -> None:
    assert planned(rigctl, plan, '{"state": "installed", "why": ""}') == []
    assert planned(rigctl, plan, "") == [
        "sgl-kernel of sglang-0.5.9: is built for this host's GPUs, proved and installed"
    ]
    built = '{"state": "built", "why": "built, not installed"}'
    assert planned(rigctl, plan, built) == [
        "sgl-kernel of sglang-0.5.9: is installed from the store (built, not installed)"
    ]
    replaced = '{"state": "replaced", "why": "something put another sgl-kernel over ours: x.so is another"}'
    told, detail = planned(rigctl, plan, replaced)
    [changed] = planned(rigctl, plan, '{"state": "installed", "why": ""}', "0" * 64)
    assert changed.endswith("is built for this host's GPUs, proved and installed (its description changes)")
    assert told.startswith("sglang-0.5.9: something put another sgl-kernel over ours") and "from the store" in detail


def test_an_upgrade_and_a_rollback_over_it_leave_what_is_installed(plan: HostPlan, rigctl: Path) -> None:
    """The order on the host, or the recorded state, is of 0.3.0: it says the same."""
    state = json.loads((Path(__file__).parents[1] / "fixtures/66d813d/kernels/state.json").read_text())
    library = state["kernels"]["sglang-0.5.9"]
    text = state["kernel_files"][library["description"]]
    assert planned(rigctl, plan, '{"state": "installed", "why": ""}', library["digest"], text) == []
    assert planned(rigctl, plan, '{"state": "installed", "why": ""}', "0" * 64, text) != []


# Store and installation


def wheel(folder: Path, content: str = "x = 1\n", version: str = "1.2.3") -> Path:
    """A wheel of one module."""
    return make_wheel(folder, "rig-kernel", version, {"rig_kernel/__init__.py": content})


def test_the_store_keeps_whole_wheels_only(tmp_path: Path) -> None:
    wanted, digest = spec(tmp_path), "0" * 16
    assert store.find(wanted, digest) is None
    stored = store.put(wanted, digest, wheel(tmp_path), {"name": "rig-kernel"})
    again = store.find(wanted, digest)
    assert again == stored and again.receipt["digest"] == digest
    stored.wheel.write_bytes(b"damaged")
    assert store.find(wanted, digest) is None and stored.wheel.exists(), "a plan looks, and changes nothing"
    assert store.put(wanted, digest, wheel(tmp_path), {"name": "rig-kernel"}) == store.find(wanted, digest)


def test_of_a_shared_place_a_wheel_is_taken_by_the_digest_that_the_order_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A receipt beside it, with the right digest, is worth nothing: whoever changed the wheel changed it too."""
    digest, shared = "d" * 16, tmp_path / "shared"
    one = spec(tmp_path / "one", kernel_store=str(shared))
    assert store.fetch(one, digest) is None
    stored = store.put(one, digest, wheel(tmp_path), {"host": "one"})
    store.publish(one, stored)
    named = stored.receipt["sha256"]
    assert f"shared_wheels: [{named}]" in capsys.readouterr().out
    assert store.fetch(spec(tmp_path / "two", kernel_store=str(shared)), digest) is None
    assert "nobody vouches for it. If a host of yours built it, name its sha256 in shared_wheels of the release's " in (
        capsys.readouterr().out
    )
    two = spec(tmp_path / "two", kernel_store=str(shared), shared_wheels=[named])
    assert (fetched := store.fetch(two, digest)) is not None and store.sha256(fetched.wheel) == named
    [place] = shared.rglob("*.whl")
    place.write_bytes(b"other bytes")
    (place.parent / "receipt.json").write_text(json.dumps({**stored.receipt, "sha256": store.sha256(place)}))
    assert store.fetch(two, digest) is None


@pytest.mark.parametrize("how", ["link", "folder", "pipe", "huge"])
def test_of_a_shared_place_only_files_are_read(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    digest, secret, place = "d" * 16, tmp_path / "secret", tmp_path / "shared" / "rig-kernel" / ("d" * 16)
    secret.mkdir()
    (secret / "x.whl").write_bytes(b"of root's alone")
    place.parent.mkdir(parents=True)
    if how == "folder":
        place.symlink_to(secret)
    else:
        place.mkdir()
    if how == "link":
        (place / "x.whl").symlink_to(secret / "x.whl")
    elif how == "pipe":
        os.mkfifo(place / "x.whl")
    elif how == "huge":
        with (place / "x.whl").open("wb") as file:
            file.truncate(builder.LARGEST + 1)
    wanted = spec(tmp_path, kernel_store=str(tmp_path / "shared"), shared_wheels=[store.sha256(secret / "x.whl")])
    with pytest.raises(RigctlError, match="it is not used"):
        store.fetch(wanted, digest)
    assert not list((wanted.root / "store").rglob("*"))


def test_a_shared_place_is_written_without_following_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "rig-kernel").symlink_to(elsewhere)
    one = spec(tmp_path / "one", kernel_store=str(tmp_path / "shared"))
    store.publish(one, store.put(one, "d" * 16, wheel(tmp_path), {"host": "one"}))
    assert not list(elsewhere.iterdir()) and "could not be written" in capsys.readouterr().out


def test_the_wheel_must_be_the_version_that_the_engine_checks_for(tmp_path: Path) -> None:
    wanted = spec(tmp_path)
    wanted.engine.lock.write_text("torch==2.9.1\nrig-kernel==1.2.3 \\\n    --hash=sha256:00\n")
    install.check_version(wanted, Path("rig_kernel-1.2.3+cu130-cp310-abi3-linux_x86_64.whl"))
    with pytest.raises(RigctlError, match=r"is version 1.2.2, the release's lock has 1.2.3"):
        install.check_version(wanted, Path("rig_kernel-1.2.2-cp310-abi3-linux_x86_64.whl"))
    with pytest.raises(RigctlError, match="is other, not rig-kernel"):
        install.check_version(wanted, Path("other-1.2.3-py3-none-any.whl"))


def test_every_file_is_compared_with_the_wheel(tmp_path: Path) -> None:
    made, site = wheel(tmp_path), tmp_path / "site"
    with zipfile.ZipFile(made) as archive:
        archive.extractall(site)
    assert install.differs(made, site) is None
    (site / "rig_kernel" / "__init__.py").write_text("y = 2\n")
    assert install.differs(made, site) == "rig_kernel/__init__.py is another"
    (site / "rig_kernel" / "__init__.py").unlink()
    assert install.differs(made, site) == "rig_kernel/__init__.py is missing"


def test_how_the_names_of_a_wheels_files_begin(tmp_path: Path) -> None:
    assert install.name_parts(wheel(tmp_path)) == ["rig_kernel/", "rig_kernel-"]


def test_one_package_of_a_lock() -> None:
    first = "a==1 \\\n    --hash=sha256:1 \\\n    --hash=sha256:2\n"
    lock = f"{first}    # via b\nsgl-kernel==0.3 \\\n    --hash=sha256:3\nz==2\n"
    assert install.lock_entry(lock, "sgl-kernel") == "sgl-kernel==0.3 \\\n    --hash=sha256:3\n"
    assert install.lock_entry(lock, "a") == first
    assert install.lock_entry(lock, "kernel") is None


def test_an_environment_in_use_is_told(tmp_path: Path) -> None:
    proc, environment = tmp_path / "proc", tmp_path / "env"
    (proc / "77").mkdir(parents=True)
    (proc / "77" / "maps").write_text(f"7f00-7f01 r-xp 0 00:00 1 {environment}/lib/x.so\n")
    (proc / "78").mkdir()
    (proc / "78" / "maps").write_text(f"7f00-7f01 r-xp 0 00:00 1 {environment}-other/lib/x.so\n")
    assert install.users(environment, proc) == [77]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"patches": "files/patches/none"}, "there is no patch in files/patches/none"),
        ({"toolchain": Toolchain(lock="files/locks/none.txt")}, "files/locks/none.txt does not exist"),
    ],
)
def test_a_kernel_that_names_what_is_not_there_is_refused_with_the_plan(what: dict[str, Any], words: str) -> None:
    release = load_catalog().releases["sglang-0.5.9"]
    assert release.kernel is not None
    wrong = release.model_copy(update={"kernel": release.kernel.model_copy(update=what)})
    with pytest.raises(CatalogError, match=words):
        _environment("sglang-0.5.9", wrong, "3.11", HostData(**data()))


def test_nothing_proves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, cuobjdump in ((tmp_path / "none.so", "/bin/true"), (tmp_path, str(tmp_path / "none"))):
        assert cli.main(["kernel", "prove", str(path), "--cuobjdump", cuobjdump]) == 1
        assert "no such file" in capsys.readouterr().err
