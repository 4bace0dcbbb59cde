"""The real stage on a real systemd: the stand-in becomes the kernel library of the sandbox's engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rig.catalog.entries import ROOT
from rigctl.contract import layout
from tests.breaker import hostile
from tests.kernel.conftest import HERE, OTHERS, TREES, dependencies
from tests.sandbox.conftest import DeployBox, removed
from tests.support.box import OVERLAY, RELEASE, overlay_with
from tests.support.leftovers import Watcher

JOB = f"kimi-job-kernel-{RELEASE}-*"


class KernelBox(DeployBox):
    """A box whose engine has a kernel library, described by `kernel`."""

    def __init__(self, overlay: Path) -> None:
        super().__init__(inventory="inventory/sandbox_kernel.py")
        self.overlay = overlay
        os.environ["KIMI_RIG_KERNEL_OVERLAY"] = os.path.relpath(overlay, OVERLAY.parent)
        self.kernel: dict[str, Any] = {
            "mode": "source",
            "package": "rig-kernel",
            "module": "rig_kernel",
            "libraries": ["rig_kernel/sm100/common_ops*.so"],
            "toolchain": {"lock": "files/locks/kernel-cu130-cp{python}.txt"},
            "source": {"kind": "directory", "path": "/srv/standin"},
            "subdirectory": "kernels",
            "architectures": ["12.0"],
            "defines": {"FETCHCONTENT_FULLY_DISCONNECTED": "ON"},
            "environment": {"CUDAFLAGS": "-DHEAVY_PERCENT=10"},
            "drop_targets": OTHERS,
            "dependencies": dependencies(Path("/srv")),
            "unused_dependencies": ["repo-extra"],
            "system_packages": ["libnuma-dev"],
            "jobs": 1,
            "minimum_disk_mib": 512,
        }

    def describe(self, **changes: Any) -> None:
        """Write the overlay: the sandbox's, and the kernel."""
        self.kernel |= changes
        self.overlay.write_text(overlay_with(releases={RELEASE: {"kernel": self.kernel}}))

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ssh(f"rigctl kernel status {RELEASE} --json", check=False).stdout)
        return found

    def receipt(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ssh(f"rigctl kernel receipt {RELEASE}").stdout)
        return found


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory, watcher: Watcher) -> Iterator[KernelBox]:
    os.environ["KIMI_RIG_SANDBOX_DIR"] = os.environ.get("KIMI_RIG_TEST_BOX_DIR", str(ROOT / ".sandbox" / "kernel"))
    os.environ["KIMI_RIG_SANDBOX_PORT"] = os.environ.get("KIMI_RIG_TEST_BOX_PORT", "2322")
    made = KernelBox(tmp_path_factory.mktemp("overlay") / "kernel.yaml")
    with removed(made, watcher):
        up = made.run("rig", "sandbox", "up")
        assert up.returncode == 0, up.stdout + up.stderr
        for name in ("standin", *TREES):
            shutil.copytree(HERE / name, made.box.root / "srv" / name, dirs_exist_ok=True)
        made.describe()
        yield made


def test_a_build_that_was_killed_is_finished_by_the_next_deploy(box: KernelBox) -> None:
    """The first deploy's build ends at half (the whole unit is killed); the second goes on with its objects."""
    command = [sys.executable, "-m", "rig", "deploy", "-v", box.inventory]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        end = time.monotonic() + 3600  # the deploy is one from bare
        script = f"journalctl -q -o cat -u '{JOB}' | grep -q '^\\[3/8\\]' && sleep 0.5"
        script += f" && systemctl kill -s KILL '{JOB}' && echo killed"
        while "killed" not in box.ssh(script, check=False).stdout:
            assert first.poll() is None, first.communicate()[0]
            assert time.monotonic() < end, "the build has not come to its third file within an hour"
            time.sleep(0.5)
        said, _ = first.communicate(timeout=600)
    finally:
        first.kill()
    assert first.returncode == 1 and "did not finish its work" in said, said
    assert not list((box.box.root / "opt/kimi-rig/env/kernels/store").rglob("*.whl"))
    second = box.deploy()
    assert second.returncode == 0, second.stdout + second.stderr
    receipt = box.receipt()
    # A third file is looked at, since configuration writes a header of it anew, and comes from ccache.
    assert receipt["objects_before"] >= 3 and receipt["compiled"] == 4 and receipt["steps"] == 6
    assert receipt["cubins"] == {"rig_kernel/sm100/common_ops.so": {"sm_120a": 6}}
    assert receipt["system_packages"].keys() == {"libnuma-dev"}
    properties = box.ssh(f"journalctl -q -o cat -u '{JOB}'").stdout
    assert "[6/6]" in properties and box.state()["state"] == "installed"


def test_nothing_to_do_is_one_fact(box: KernelBox) -> None:
    plan, deploy = box.plan(), box.deploy()
    assert (plan.returncode, deploy.returncode) == (0, 0), plan.stdout + plan.stderr + deploy.stdout
    assert len(list((box.box.root / "opt/kimi-rig/env/kernels/store").rglob("*.whl"))) == 1


def test_the_live_host_is_verified(box: KernelBox) -> None:
    verified = box.verify()
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_the_engine_has_a_toolkit_and_the_module(box: KernelBox) -> None:
    unit = box.ssh("systemctl show -P Environment kimi-vllm-base").stdout
    home = next(word.removeprefix("CUDA_HOME=") for word in unit.split() if word.startswith("CUDA_HOME="))
    assert "V13.0" in box.ssh(f"{home}/bin/nvcc --version").stdout
    python = f"$(readlink -f /opt/kimi-rig/env/{RELEASE}/current)/bin/python"
    command = f"LD_LIBRARY_PATH={home}/lib64/stubs {python} -c 'import rig_kernel; print(rig_kernel.scale)'"
    assert "rig_kernel.scale" in box.ssh(command).stdout


def test_another_flag_is_another_wheel_and_the_first_comes_back_from_the_store(box: KernelBox) -> None:
    first = box.receipt()["digest"]
    box.describe(defines={"FETCHCONTENT_FULLY_DISCONNECTED": "ON", "RIG_KERNEL_THREADS": "2"})
    plan = box.plan()
    assert plan.returncode == 2 and "rig-kernel" in plan.stdout
    deploy = box.deploy()
    assert deploy.returncode == 0, deploy.stdout + deploy.stderr
    second = box.receipt()["digest"]
    assert second != first
    box.describe(defines={"FETCHCONTENT_FULLY_DISCONNECTED": "ON"})
    assert box.deploy().returncode == 0 and box.receipt()["digest"] == first
    assert len(list((box.box.root / "opt/kimi-rig/env/kernels/store").rglob("*.whl"))) == 2


def test_a_rollback_returns_to_the_kernel_of_that_deploy(box: KernelBox) -> None:
    """All of the latest deploys have the same environment: only the library in it was another."""
    first = box.receipt()["digest"]
    back = box.run("rig", "rollback", box.inventory)
    assert back.returncode == 0, back.stdout + back.stderr
    assert box.receipt()["digest"] != first and box.state()["state"] == "installed"
    refused = box.deploy()
    assert refused.returncode == 1 and "rolled back" in refused.stderr
    assert box.run("rig", "rollback", box.inventory, "--to", states(box)[0]).returncode == 0
    assert box.receipt()["digest"] == first and box.plan().returncode == 0


def states(box: KernelBox) -> list[str]:
    """Identities of the host's recorded states, newest first."""
    return box.ssh(f"cd {layout.STATES} && ls -1t ????????????.json | sed s/.json//").stdout.split()


def test_what_was_put_over_it_is_told_and_repaired(box: KernelBox) -> None:
    site = f"$(readlink -f /opt/kimi-rig/env/{RELEASE}/current)/lib/python3.11/site-packages"
    box.ssh(f"echo 'other = 1' > {site}/rig_kernel/__init__.py")
    plan = box.plan()
    assert plan.returncode == 2 and "something put another rig-kernel over ours" in plan.stdout, plan.stdout
    assert box.verify().returncode == 1
    assert box.deploy().returncode == 0 and box.state()["state"] == "installed"


def test_a_hostile_build_script_and_module_get_nowhere(box: KernelBox) -> None:
    """CMake runs it, the wheel's module repeats it when it is imported: as the builder, and nothing of it is left."""
    source = box.box.root / "srv" / "hostile"
    shutil.copytree(HERE / "standin", source)
    shutil.copy(hostile.__file__, source / "hostile.py")
    lists = source / "kernels" / "CMakeLists.txt"
    run = "/usr/bin/python3 /srv/hostile/hostile.py"
    lists.write_text(lists.read_text() + f"execute_process(COMMAND {run})\n")
    [module] = source.rglob("rig_kernel/__init__.py")
    module.write_text(module.read_text() + f"\nimport subprocess\n\nsubprocess.run({run.split()})\n")
    box.ssh("echo of-root > /root/secret")
    box.describe(source={"kind": "directory", "path": "/srv/hostile"})
    deploy = box.deploy()
    log = box.ssh("cat /opt/kimi-rig/env/kernels/work/rig-kernel/*/build.log", check=False).stdout
    assert deploy.returncode == 0, deploy.stdout + deploy.stderr + log
    assert not box.ssh(f"pgrep -u {layout.BUILDER} -a", check=False).stdout
    planted = "find / -xdev -name planted -o -xdev -user kimi-build -perm /6000"
    assert not box.ssh(f"{planted} 2>/dev/null; ls /dev/shm", check=False).stdout.strip()
    assert box.ssh(f"find /opt/kimi-rig/env/{RELEASE} /opt/kimi-rig/env/kernels/store ! -user root").stdout == ""
    box.describe(source={"kind": "directory", "path": "/srv/standin"})
    assert box.deploy().returncode == 0


def test_uninstall_takes_it_all_away(box: KernelBox) -> None:
    done = box.run("rig", "uninstall", box.inventory, "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    left = box.ssh(
        f"ls -d {layout.KERNELS} /opt/kimi-rig/env/kernels /opt/kimi-rig/env/toolchain 2>/dev/null", check=False
    )
    assert not left.stdout.strip()
    assert (box.box.root / "srv" / "standin" / "kernels" / "pyproject.toml").exists(), "the operator's source stays"
