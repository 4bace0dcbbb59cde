"""The disk plan: what lies on a host's disks, what a deploy adds, what may go, and whether it fits."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rig.artifacts.disk import KINDS, disk
from rig.artifacts.units import cache_directory
from rig.catalog.entries import ROOT
from rig.cli.converge import Plan, plan_of
from rig.cli.status import HostStatus, ask
from rig.facts import remote_script
from rig.facts.host import DataPath, DiskUse, HostFacts, parse_host
from rig.facts.report import HostReport
from rig.host.disk import FileSystem, Item, file_systems
from rig.plan.host_plan import HostPlan, plan_from_facts, questions
from tests.support.plans import data

GB = 10**9
TURIN = ROOT / "rig/facts/turin-direct.json"
DATA = data("gpu", configurations=["vllm-base"])
ENV = "/opt/kimi-rig/env/vllm-0.16.0"
OLD = f"{ENV}/0123456789ab"


def place(path: str, mount: str = "/", device: int = 1, **more: Any) -> DataPath:
    return DataPath(**{"path": path, "exists": True, "mount": mount, "filesystem": "ext4", "source": f"/dev/{device}",
                       "size": 4000 * GB, "free": 100 * GB, "device": device, **more})  # fmt: skip


def use(kind: str, path: str, count: int | None = GB, name: str | None = None, **more: Any) -> DiskUse:
    mounts = {"/shared": 2, "/data": 3}
    mount = next((one for one in mounts if path.startswith(one)), "/")
    return DiskUse(kind, name or path, place(path, mount, mounts.get(mount, 1)), count, **more)


def plan_with(*uses: DiskUse, **paths: DataPath) -> HostPlan:
    facts = replace(parse_host(TURIN.read_text()), disk=uses)
    return plan_from_facts(DATA, replace(facts, paths={**facts.paths, **{one.path: one for one in paths.values()}}))


BARE = plan_with()


def items(plan: HostPlan) -> dict[str, Item]:
    return {item.path: item for one in disk(plan) for item in one.there}


def test_what_the_plan_needs_stays_and_all_else_has_its_command() -> None:
    [environment] = BARE.environments.values()
    needed = [
        use("checkpoint", "/shared/kimi-k2.5-int4"),
        use("staging", "/shared/.kimi-k2.5-int4.partial"),
        use("current", f"{ENV}/ba9876543210"),
        use("environment", environment.path),
        use("cache", cache_directory(BARE, "vllm-base")),
        use("log", "/var/log/kimi-rig/vllm-base"),
        use("adopted", "/shared/k2", name="k2"),
        use("environment", f"{ENV}/aaaaaaaaaaaa", used=True),
        use("states", "/var/lib/kimi-rig/states"),
    ]
    may_go = {
        use("environment", OLD): f"/usr/local/bin/rigctl prune --drop {OLD}",
        use("staged", "/shared/my old", name="k1"): "/usr/local/bin/rigctl checkpoints forget k1 && "
        "rm -rf '/shared/my old'",
        use("staging", "/shared/.k1.partial"): "rm -rf /shared/.k1.partial",
        use("wheels", "/opt/kimi-rig/env/.cache"): "/opt/kimi-rig/hostkit/current/bin/uv cache clean --cache-dir "
        "/opt/kimi-rig/env/.cache",
        use("work", "/opt/kimi-rig/env/kernels/ccache"): "rm -rf /opt/kimi-rig/env/kernels/ccache",
        use(
            "cache", "/var/cache/kimi-rig/vllm-base/vllm-0.16.0-0"
        ): "rm -rf /var/cache/kimi-rig/vllm-base/vllm-0.16.0-0",
        use("log", "/var/log/kimi-rig/sglang-base"): "rm -rf /var/log/kimi-rig/sglang-base",
    }
    found = items(plan_with(*needed, *may_go))
    assert {path: item.command for path, item in found.items() if item.command} == {
        one.place.path: command for one, command in may_go.items()
    }
    assert found["/shared/kimi-k2.5-int4"].what == "checkpoint kimi-k2.5-int4"
    assert found["/shared/k2"].what == "checkpoint k2, which the plan does not use and the operator brought"
    assert len(found) == len(needed) + len(may_go)


def test_every_kind_that_a_host_is_asked_for_has_words() -> None:
    asked = questions(DATA)["disk"]
    assert {kind for kind, _ in asked} <= KINDS.keys() and {"staged", "adopted"} <= KINDS.keys()
    assert [kind for kind, _ in asked].index("current") < [kind for kind, _ in asked].index("environment")
    odd = questions(data("gpu", models="/mo[d]els"))["disk"]
    assert ["staging", "/mo[[]d]els/.*.partial"] in odd, "a path is no pattern"


def test_the_largest_comes_first_and_what_is_small_is_left_out() -> None:
    full = FileSystem(
        "/",
        100 * GB,
        5 * GB,
        (Item("log", "/l", 5, "rm /l"), Item("a", "/a", GB, "rm /a"), Item("b", "/b", 9 * GB, "rm /b")),
    )
    assert full.cure == "b 9.0 GB: `rm /b`; a 1.0 GB: `rm /a`"
    assert full.lines() == [
        "disk /: 5.0 GB free of 100 GB; ours: a 1.0 GB, b 9.0 GB",
        f"  may go: {full.cure}",
    ]
    assert len(replace(full, free=50 * GB).lines()) == 1, "what may go is shown where it is tight"


@pytest.mark.parametrize(
    ("filesystem", "sources", "pools"),
    [
        ("ext4", ("/dev/a", "/dev/b"), 2),
        ("btrfs", ("/dev/a", "/dev/a"), 1),
        ("zfs", ("tank/models", "tank/opt"), 1),
        ("zfs", ("tank/models", "fast/opt"), 2),
    ],
)
def test_what_shares_its_free_space_is_counted_together(filesystem: str, sources: tuple[str, str], pools: int) -> None:
    adds = [
        (place(f"/{n}", f"/{n}", n, filesystem=filesystem, source=source), Item("x", f"/{n}", 60 * GB))
        for n, source in enumerate(sources)
    ]
    found = file_systems([], adds)
    assert len(found) == pools
    assert all(one.fits for one in found) is (pools == 2)


def test_a_kernel_build_is_counted_until_its_wheel_is_there() -> None:
    names = ["sglang-base"]
    facts = parse_host(TURIN.read_text())
    plan = plan_from_facts(data("gpu", configurations=names), facts)
    kernels = {env.release.kernel.package for env in plan.environments.values() if env.release.kernel}
    wanted = [item for one in disk(plan) for item in one.adds if item.what.startswith("kernel")]
    assert {item.what for item in wanted} <= {f"kernel build of {name}" for name in kernels}
    there = replace(
        plan, facts=replace(facts, disk=tuple(use("kernels", f"/opt/kimi-rig/env/kernels/store/{k}") for k in kernels))
    )
    assert not [item for one in disk(there) for item in one.adds if item.what.startswith("kernel")]


def test_plan_and_its_json_have_the_account() -> None:
    [account] = file_systems([(place("/opt/x"), Item("environment", "/opt/x", 12 * GB))], [])
    entries = [{"host": "h", "reached": True}, {"host": "h", "disk": [account.document()]}]
    plan = plan_of(["h"], [], json.loads(json.dumps(entries)))
    assert "  disk /: 100 GB free of 4,000 GB; ours: environment 12 GB" in plan.text()
    assert plan.disk["h"][0]["there"] == [{"what": "environment", "path": "/opt/x", "bytes": 12 * GB, "command": ""}]
    assert Plan(["h"], []).disk == {}


def test_status_has_the_free_space_and_what_does_not_fit() -> None:
    [full] = file_systems(
        [], [(place("/shared", "/shared", free=GB), Item("checkpoint kimi", "/shared/kimi", 595 * GB))]
    )
    shown = HostStatus("h", deployed="x", disk=[full.document()]).line()
    assert (
        "disk: /shared 1.0 GB free of 4,000 GB, no room: /shared has 1.0 GB free of 4,000 GB, a deploy needs 595 GB"
        in shown
    )


# -- the facts -----------------------------------------------------------------------------------------------


def read(**options: Any) -> HostFacts:
    """The facts of this machine, by the shell command that reads a host."""
    command = HostReport().command({"only_disk": True, **options})
    done = subprocess.run(["sh", "-c", command], capture_output=True, errors="replace", check=True)
    return HostReport().process(done.stdout.splitlines())


def test_a_file_of_several_names_counts_once_with_the_first(tmp_path: Path) -> None:
    for name in ("new", "old", "cache"):
        (tmp_path / name).mkdir()
    (tmp_path / "new/torch").write_bytes(bytes(1 << 20))
    for name in ("old", "cache"):
        os.link(tmp_path / "new/torch", tmp_path / name / "torch")
    (tmp_path / "old/own").write_bytes(bytes(1 << 19))
    (tmp_path / "current").symlink_to("new")
    wanted = [["current", f"{tmp_path}/current"], ["environment", f"{tmp_path}/[no]*"], ["wheels", f"{tmp_path}/cache"],
              ["log", f"{tmp_path}/nowhere"]]  # fmt: skip
    facts = read(disk=wanted, paths=[str(tmp_path)])
    mine = {one.place.path: one for one in facts.disk if one.place.path.startswith(str(tmp_path))}
    assert [(one.kind, Path(path).name) for path, one in mine.items()] == [
        ("current", "new"), ("environment", "old"), ("wheels", "cache")]  # fmt: skip
    counts = [one.bytes or 0 for one in mine.values()]
    assert counts[0] >= 1 << 20 and 1 << 19 <= counts[1] < 1 << 20 and counts[2] < 1 << 19
    assert str(tmp_path) in facts.paths and not facts.gpus


def test_what_a_process_names_is_in_use(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with subprocess.Popen(["sleep", "60"], env={"XDG_CACHE_HOME": f"{tmp_path}/a", **os.environ}) as process:
        try:
            facts = read(disk=[["cache", f"{tmp_path}/[ab]"]])
        finally:
            process.kill()
    assert [one.used for one in facts.disk if one.kind == "cache"] == [True, False]


def test_disks_that_take_too_long_are_of_unknown_size(tmp_path: Path) -> None:
    facts = read(disk=[["cache", str(tmp_path)]], timeout=0)
    assert [one.bytes for one in facts.disk if one.kind == "cache"] == [None]
    assert "du: no answer in 0 s" in facts.unknown["disk"]


@settings(max_examples=15, deadline=None)  # each calls du
@given(name=st.binary(min_size=1, max_size=20).filter(lambda name: not {*name} & {0, 47} and name not in (b".", b"..")))
def test_names_of_any_bytes_are_counted(name: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, os.fsdecode(name))
        path.mkdir()
        (path / "x").write_bytes(bytes(1 << 16))
        options = {"disk": [["log", f"{folder}/[!.]*"], ["log", f"{folder}/.*"]], "only_disk": True}
        facts = parse_host(json.dumps(remote_script.collect(options)))
    [found] = [one for one in facts.disk if one.kind == "log"]
    assert found.bytes is not None and found.bytes >= 1 << 16
    json.dumps(
        HostStatus("h", disk=[one.document() for one in file_systems([(found.place, Item("x", "y", 1))], [])]).disk
    )


COUNTS = st.none() | st.integers(0, 10**16)
PLACES = st.builds(
    place,
    st.just("/x"),
    st.sampled_from(["/", "/a", "/b"]),
    st.integers(-1, 3),
    filesystem=st.sampled_from(["ext4", "btrfs", "zfs", ""]),
    source=st.sampled_from(["/dev/a", "pool/x", "pool", ""]),
    size=st.integers(0, 10**16),
    free=st.integers(0, 10**16),
)
ITEMS = st.lists(
    st.tuples(PLACES, st.builds(Item, st.just("x y"), st.text(max_size=9), COUNTS, st.sampled_from(["", "rm"]))),
    max_size=6,
)


@given(there=ITEMS, adds=ITEMS)
def test_every_byte_is_in_one_account(there: list[tuple[DataPath, Item]], adds: list[tuple[DataPath, Item]]) -> None:
    found = file_systems(there, adds)
    for kind, items in (("there", there), ("adds", adds)):
        counted = [item for one in found for item in getattr(one, kind)]
        assert sorted(map(str, counted)) == sorted(str(item) for _, item in items)
    assert sum(one.needed for one in found) == sum(item.bytes or 0 for _, item in adds)
    for one in found:
        assert one.fits is (one.needed <= one.free)
        assert one.free <= max(place.free for place, _ in [*there, *adds])
        assert json.loads(json.dumps(one.document()))["lines"][0].startswith(f"disk {one.mount}: ")


@example(uses=[use("{", "/x")])
@given(
    uses=st.lists(
        st.builds(
            DiskUse,
            st.text(max_size=8) | st.sampled_from(sorted(KINDS)),
            st.text(max_size=9),
            PLACES,
            COUNTS,
            st.booleans(),
        ),
        max_size=4,
    )
)
def test_whatever_lies_there_nothing_that_is_in_use_may_go(uses: list[DiskUse]) -> None:
    plan = replace(BARE, facts=replace(BARE.facts, disk=tuple(uses)))
    found = [item for one in disk(plan) for item in one.there]
    assert len(found) == len(uses)
    assert len([item for item in found if item.command]) <= len([one for one in uses if not one.used])


def test_status_of_a_host_counts_with_the_plan_that_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The script that ssh gets, run here: facts of this machine's disks, and no others."""
    run, script = subprocess.run, []

    def here(command: list[str], **more: Any) -> Any:
        script.append(more["input"].decode())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", here)
    ask("@local", DATA, tmp_path)
    monkeypatch.undo()
    command = script[0].partition("section disk\n")[2]
    facts = HostReport().process(
        run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout.splitlines()
    )
    assert set(questions(DATA)["paths"]) <= facts.paths.keys() and not facts.units
