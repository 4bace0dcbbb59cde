"""`rigctl warm`: what is read, what is left alone, and when nothing is."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rigctl.contract import layout
from rigctl.errors import RigctlError
from rigctl.page_cache import BLOCK, evict
from rigctl.services import switching, warming
from rigctl.supervisor.specification import Specification
from tests.unit.serving import specification

SIZE = 3 * BLOCK + 100


class Host:
    """Two checkpoints of some blocks each on a real disk, and a memory of a given size."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.next, self.serving = (self._made(root / name) for name in ("next", "serving"))
        self.memory = SimpleNamespace(total=1 << 40, available=1 << 39)
        self.states = {self.serving.unit: "active", self.next.unit: "inactive"}
        monkeypatch.setattr(warming.psutil, "virtual_memory", lambda: self.memory)
        monkeypatch.setattr(warming, "installed", lambda: [self.next, self.serving])
        monkeypatch.setattr(warming, "properties", lambda unit, _: {"ActiveState": self.states[unit]})
        self.nice: list[Any] = []
        process = SimpleNamespace(nice=self.nice.append, ionice=self.nice.append)
        monkeypatch.setattr(warming.psutil, "Process", lambda: process)

    @staticmethod
    def _made(folder: Path) -> Specification:
        folder.mkdir()
        for name in ("a.safetensors", "b.safetensors"):
            (folder / name).write_bytes(os.urandom(SIZE))
            with (folder / name).open("rb") as file:
                os.fsync(file.fileno())
        return specification(name=folder.name, target_path=str(folder), drafter_path=None)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def dropped(one: Specification) -> int:
    """Take its files out of the page cache; what is left there."""
    for path in warming.files(one):
        evict(path)
    return sum(map(warming.cached, warming.files(one)))


def test_its_files_are_in_memory_afterwards(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    if dropped(host.next):
        pytest.skip("this file system keeps pages (tmpfs)")
    assert warming.warm(host.next) == 0
    assert sum(map(warming.cached, warming.files(host.next))) == 2 * SIZE
    assert host.nice == [19, warming.psutil.IOPRIO_CLASS_IDLE]
    said = capsys.readouterr().out
    assert "next: into memory 25.2 MB of 25.2 MB (100.0 %)" in said
    assert said.endswith("next: 25.2 MB are in memory\n")


def test_what_serves_keeps_its_files_in_memory(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "cached", lambda path: SIZE if path.parent.name == "serving" else 0)
    host.memory.total = 0
    host.memory.available = 4 * SIZE - 1
    with pytest.raises(RigctlError, match=r"^next: 25.2 MB of its 25.2 MB .* for 25.2 MB beside .*: nothing is read"):
        warming.warm(host.next)
    assert host.nice == []
    host.states[host.serving.unit] = "inactive"
    assert warming.warm(host.next) == 0


def test_it_ends_when_memory_becomes_short(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "reserve", lambda _: 0)
    monkeypatch.setattr(warming, "reserve_of_host", lambda: host.memory.available + 1)
    with pytest.raises(RigctlError, match="memory became short"):
        warming.warm(host.next)


def test_a_switch_goes_on_without_it(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(_: Specification) -> int:
        raise RigctlError("next: no room")

    class Started(Exception):
        pass

    def start(*_: object, **__: object) -> None:
        raise Started

    monkeypatch.setattr(switching, "warm", refused)
    monkeypatch.setattr(switching.subprocess, "Popen", start)
    monkeypatch.setattr(layout, "SERVING", str(Path(host.next.target_path, "none")))
    with pytest.raises(Started):
        switching.switch_to(host.next, warmed=True)
    assert capsys.readouterr().out == "switching without it: next: no room\n"
