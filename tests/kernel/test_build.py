"""From a source tree to a module that the engine imports: forced architectures, proof, store, installation."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rigctl.engines.installed import distributions, site_packages
from rigctl.errors import RigctlError
from rigctl.kernel import build, store, toolchain
from tests.kernel.conftest import PYTHON, Bench


def others(bench: Bench) -> set[tuple[str, str]]:
    installed = distributions(site_packages(bench.parts.engine))
    return {(each.name, each.version) for each in installed if each.name != "rig-kernel"}


def test_built_proved_installed_and_then_left_alone(bench: Bench) -> None:
    before = others(bench)
    assert bench.state()["state"] == "missing"
    said = bench.rigctl()
    assert "[8/8]" in said, "progress, and two targets are gone: of 22 steps 8 are left"
    receipt = bench.receipt()
    assert receipt["cubins"] == {"rig_kernel/sm100/common_ops.so": {"sm_120a": 6}}
    assert receipt["inputs"]["architectures"] == ["120a"] and receipt["peak_mib"] > 0 and receipt["jobs"] >= 1
    assert others(bench) == before and bench.imports() == "rig_kernel.scale"
    assert not (bench.root / "mathlib" / "include" / "generated.h").exists(), (
        "configuration wrote into the operator's tree"
    )
    assert not list(bench.source.rglob("*.so"))
    assert not list((bench.root / "kernels" / "work").glob("*/*")), "the work directory is gone"
    assert bench.state()["state"] == "installed"
    again = bench.rigctl()
    assert "building" not in again and len(bench.stored()) == 1


def test_every_input_makes_another_wheel(bench: Bench, tmp_path: Path) -> None:
    bench.rigctl()
    digests = [bench.receipt()["digest"]]

    def rebuilt() -> None:
        state = bench.state()
        assert state["state"] == "missing" and digests[-1] in state["why"]
        bench.rigctl()
        receipt = bench.receipt()
        assert receipt["digest"] not in digests and bench.state()["state"] == "installed"
        digests.append(receipt["digest"])

    bench.changes["defines"] = {**bench.content()["defines"], "RIG_KERNEL_THREADS": "1"}
    rebuilt()
    header = bench.source / "shared" / "include" / "rig_shared.h"
    header.write_text(header.read_text().replace("256", "128"))
    rebuilt()
    dependency = bench.root / "mathlib" / "include" / "mathlib.h"
    dependency.write_text(dependency.read_text() + "\n// another\n")
    rebuilt()
    bench.changes |= other_torch(bench, tmp_path)
    toolchain.provide(bench.spec)
    rebuilt()
    assert len(bench.stored()) == 5
    bench.changes.pop("engine")
    said = bench.rigctl()
    assert "building" not in said and bench.receipt()["digest"] == digests[-2], "an earlier state comes from the store"


def other_torch(bench: Bench, tmp_path: Path) -> dict[str, Any]:
    """The same engine with a torch that calls itself another version."""
    engine = tmp_path / "env" / "engine" / "ba9876543210"
    shutil.copytree(bench.parts.engine, engine, symlinks=True, copy_function=lambda a, b: Path(b).hardlink_to(a))
    site = site_packages(engine)
    [old] = site.glob("torch-*.dist-info")
    name, version = old.name.removesuffix(".dist-info").split("-")
    new = old.with_name(f"{name}-9.9.9.dist-info")
    old.rename(new)
    record = (new / "RECORD").read_text().replace(old.name, new.name)
    (new / "RECORD").unlink()
    (new / "RECORD").write_text(record)
    lock = tmp_path / "other.txt"
    lock.write_text(bench.parts.lock.read_text().replace(f"torch=={version}", "torch==9.9.9"))
    return {"engine": {"path": str(engine), "python": PYTHON, "lock": str(lock)}}


def test_a_wheel_for_other_cards_is_not_installed(bench: Bench) -> None:
    """The proof reads the wheel: one that was built for 8.0 is refused for a card of 12.0, and says what it holds."""
    bench.small()
    bench.changes["architectures"] = ["8.0"]
    stored = bench.built(2)
    assert stored.receipt["cubins"] == {"rig_kernel/libflash_ops.so": {"sm_80": 2}}
    bench.changes["architectures"] = ["12.0"]
    wanted = bench.builder()
    with pytest.raises(RigctlError, match=r"not for 120a alone .*libflash_ops.so holds 2 x sm_80; sm_80 is not wanted"):
        build.prove(bench.spec, stored.wheel, wanted.chain, wanted.inputs.values["architectures"])
    bench.changes["kernel_store"] = str(bench.root / "shared")
    foreign = store.put(bench.spec, wanted.inputs.digest, stored.wheel, {"host": "another"})
    bench.changes["shared_wheels"] = [foreign.receipt["sha256"]]
    store.publish(bench.spec, foreign)
    shutil.rmtree(store.folder(bench.spec, wanted.inputs.digest))
    said = bench.rigctl(code=1)
    assert "is not for 120a alone" in said and bench.state()["state"] == "missing", "what is fetched is proved too"


def test_a_target_that_is_not_there_is_named(bench: Bench) -> None:
    bench.small()
    bench.changes["drop_targets"] = ["flash_mla"]
    said = bench.rigctl(code=1)
    assert "there is no target flash_mla, which the kernel's drop_targets names" in " ".join(said.split())


def test_another_host_takes_the_wheel(bench: Bench, tmp_path: Path) -> None:
    bench.changes["kernel_store"] = str(tmp_path / "shared")
    bench.rigctl()
    bench.changes["shared_wheels"] = [bench.receipt()["sha256"]]
    shutil.rmtree(bench.root / "kernels" / "store")
    said = bench.rigctl()
    assert "was fetched from" in said and "building" not in said
    assert bench.state()["state"] == "installed" and bench.receipt()["fetched_from"] == str(tmp_path / "shared")


def test_a_git_source_of_the_real_layout(bench: Bench, tmp_path: Path) -> None:
    """A commit, a subdirectory, an include from beside it, a patch."""
    bench.small()
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "one"]):
        subprocess.run(["git", *arguments], cwd=bench.source, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=bench.source, check=True, capture_output=True, text=True)
    series = tmp_path / "series"
    series.mkdir()
    (series / "1.patch").write_text(
        "--- a/shared/include/rig_shared.h\n+++ b/shared/include/rig_shared.h\n@@ -1,2 +1,2 @@\n #pragma once\n"
        "-constexpr int threads_per_block = 256;\n+constexpr int threads_per_block = 64;\n"
    )
    bench.changes |= {
        "source": {"kind": "git", "url": str(bench.source), "commit": head.stdout.strip()},
        "patches": str(series),
    }
    stored = bench.built(2)
    assert stored.receipt["inputs"]["source"] == f"git:{head.stdout.strip()}"
    assert stored.receipt["cubins"] == {"rig_kernel/libflash_ops.so": {"sm_120a": 2}}


def test_the_stock_wheel_comes_back_in_one_step(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_FIND_LINKS", str(bench.parts.stock.parent))
    bench.rigctl()
    before = others(bench)
    assert "the lock's" in bench.rigctl("stock")
    assert bench.imports() == "True" and others(bench) == before and bench.state()["state"] == "built"
    bench.changes["mode"] = "wheel"
    assert "the stock rig-kernel 1.2.3 is not for this host's GPU" in bench.rigctl(code=1), "it has no library at all"
