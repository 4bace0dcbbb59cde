"""Building an environment with the real uv from small wheels: whole or not at all, whatever fails and whenever."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rigctl.engines import drift, patches, prune
from rigctl.engines.drift import LOCK, SERIES
from rigctl.engines.environment import STAMP
from rigctl.errors import RigctlError
from tests.support.unconfined import CODE as RIGCTL
from tests.unit.wheelhouse import lock_text, wheel

pytestmark = pytest.mark.slow  # each test makes environments

ROOT = Path(__file__).resolve().parents[2]
PATCH = """What: another answer
Why: for this test
Upstream: none#1
Native-from: 9
Native-if: engine/__init__.py :: NATIVE

--- a/engine/__init__.py
+++ b/engine/__init__.py
@@ -1 +1 @@
-ANSWER = 1
+ANSWER = 2
--- a/engine/second.py
+++ b/engine/second.py
@@ -1 +1 @@
-SECOND = 1
+SECOND = 2
"""


class Host:
    """A wheel directory, a lock, a series, and what was built of them; nothing of it needs a network."""

    def __init__(self, root: Path) -> None:
        self.root, self.wheels, self.series = root, root / "wheels", root / "series"
        engine = {"engine/__init__.py": "ANSWER = 1\n", "engine/second.py": "SECOND = 1\n"}
        engine |= {f"engine/part{number}.py": f"NUMBER = {number}\n" for number in range(400)}
        # What does not compress fills a disk.
        self.files = [
            wheel(self.wheels, "engine", "1.0", engine),
            wheel(self.wheels, "helper", "2.0", {"helper/data.txt": os.urandom(1 << 20).hex()}),
        ]
        self.series.mkdir()
        (self.series / "0001-answer.patch").write_text(PATCH)
        self.lock("good", lock_text(*self.files))

    def lock(self, name: str, text: str) -> None:
        (self.root / f"{name}.txt").write_text(text)

    def environment(self, name: str, base: Path | None = None) -> Path:
        return (base or self.root) / "env" / name

    def command(self, name: str, lock: str = "good", base: Path | None = None, code: str = RIGCTL) -> list[str]:
        order: dict[str, Any] = {
            "format": 1,
            "path": str(self.environment(name, base)),
            "python": ".".join(map(str, system_python())),
            "lock": str(self.root / f"{lock}.txt"),
            "patches": str(self.series),
            "cache": str((base or self.root) / "cache"),
            "index": None,
            "wheels": str(self.wheels),
        }
        return [sys.executable, "-c", code, "environment", "build", json.dumps(order)]

    def build(self, *arguments: Any, **more: Any) -> subprocess.CompletedProcess[str]:
        return run(self.command(*arguments, **more))

    def answer(self, name: str) -> str:
        """What the environment's own interpreter imports."""
        command = [str(self.environment(name) / "bin/python"), "-I", "-c", "import engine; print(engine.ANSWER)"]
        return run(command).stdout.strip()

    def findings(self, name: str, base: Path | None = None) -> list[str]:
        """What is wrong with an environment, by its own lock and series; every byte is read."""
        path = self.environment(name, base)
        [site] = path.glob("lib/python3*/site-packages")
        expected = drift.Expected(site, path / drift.STAMP, path / LOCK, path / SERIES)
        return [f"{each.where}: {each.what}" for each in drift.inspect(expected, full=True)]


def system_python() -> tuple[int, int]:
    """Version of the distribution's own interpreter, which environments are made with."""
    found = run(["/usr/bin/python3", "-c", "import sys; print(*sys.version_info[:2])"]).stdout.split()
    return int(found[0]), int(found[1])


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "files/hostkit")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host with one environment, in use."""
    host = Host(tmp_path)
    built = host.build("old")
    assert built.returncode == 0, built.stderr
    assert host.answer("old") == "2"
    return host


def refused(host: Host, built: subprocess.CompletedProcess[str], *words: str, base: Path | None = None) -> None:
    """It failed with these words, nothing is left of the new environment, the old one answers and is unharmed."""
    assert built.returncode == 1, built.stdout + built.stderr
    assert "Traceback" not in built.stderr, built.stderr
    for word in (*words, "was not made and nothing uses it", "deploy again"):
        assert re.search(word, built.stderr), f"{word!r} is not in:\n{built.stderr}"
    assert not host.environment("new", base).exists(), "it would only take room"
    assert host.answer("old") == "2"
    assert host.findings("old") == []


def test_built_patched_proved_and_again_no_change(host: Host) -> None:
    assert host.findings("old") == []
    before = {path: path.stat().st_mtime_ns for path in host.environment("old").rglob("*.py")}
    again = host.build("old")
    assert (again.returncode, again.stdout.strip()) == (0, f"{host.environment('old')} is complete")
    assert before == {path: path.stat().st_mtime_ns for path in host.environment("old").rglob("*.py")}


def test_a_login_with_a_narrow_umask_makes_what_others_can_use(host: Host) -> None:
    built = run(["sh", "-c", 'umask 077; exec "$@"', "sh", *host.command("narrow")])
    assert built.returncode == 0, built.stderr
    for path in (host.environment("narrow"), *host.environment("narrow").rglob("*"), host.root / "cache"):
        assert path.is_symlink() or path.stat().st_mode & 0o044 == 0o044, path


def test_a_second_environment_is_files_of_its_own_and_neither_it_nor_the_cache_is_patched(host: Host) -> None:
    """A file that root took over with the first one cannot be linked by the builder (fs.protected_hardlinks)."""
    assert host.build("new").returncode == 0
    [old], [new] = (
        list(host.environment(name).glob("lib/python3*/site-packages/engine/part7.py")) for name in ("old", "new")
    )
    assert old.stat().st_nlink == new.stat().st_nlink == 1
    shutil.rmtree(host.environment("new"))
    command = host.command("plain")
    command[-1] = json.dumps(json.loads(command[-1]) | {"patches": None})
    assert run(command).returncode == 0
    assert (host.answer("plain"), host.answer("old")) == ("1", "2")


def test_wheels_of_a_directory_are_unpacked_again_after_the_cache_was_swept(host: Host) -> None:
    for cache in (host.root / "cache", *(host.root / "cache").iterdir()):
        prune.sweep(cache)
    assert not list((host.root / "cache").rglob("engine"))
    built = host.build("new")
    assert built.returncode == 0, built.stderr
    assert host.answer("new") == "2"


def test_a_wrong_hash_in_the_lock(host: Host) -> None:
    wrong = re.sub(r"(helper==2.0 \\\n    --hash=sha256:)\w{4}", r"\g<1>0000", lock_text(*host.files))
    host.lock("wrong", wrong)
    refused(host, host.build("new", "wrong"), "Hash mismatch", "helper", "could not be installed")


def test_a_wheel_that_is_missing_from_the_directory(host: Host) -> None:
    third = wheel(host.wheels, "third", "3.0", {"third.py": ""})
    host.lock("more", lock_text(*host.files, third))
    third.unlink()
    refused(host, host.build("new", "more"), "third", "could not be installed")


def test_a_package_that_overwrites_anothers_file(host: Host) -> None:
    """A later package's bytes in the engine's own file: the proof at the end refuses, not the installer."""
    rival = wheel(host.wheels, "rival", "1.0", {"engine/second.py": "SECOND = 3\n"})
    host.lock("rival", lock_text(*host.files, rival))
    built = host.build("new", "rival")
    assert built.returncode == 1 and "second.py" in built.stderr and "Traceback" not in built.stderr
    assert not host.environment("new").exists()
    assert host.answer("old") == "2"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB; both packages together need more."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system cannot be mounted here: it takes root")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_disk_that_is_full_in_the_middle_of_an_install(host: Host, small_disk: Path) -> None:
    (small_disk / "env").mkdir()
    built = host.build("new", base=small_disk)
    refused(host, built, "No space left on device", "could not be installed", base=small_disk)
    shutil.rmtree(small_disk / "cache")
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    assert host.build("new", base=small_disk).returncode == 0
    assert host.findings("new", small_disk) == []


def test_a_cache_may_be_on_another_file_system(host: Host, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    shutil.rmtree(host.root / "cache")
    (host.root / "cache").symlink_to(small_disk)
    built = host.build("new")
    assert built.returncode == 0, built.stdout + built.stderr
    assert host.findings("new") == [] and host.answer("new") == "2"


def test_a_disk_that_is_full_at_the_last_file(host: Host) -> None:
    full = RIGCTL.replace("import sys;", "import sys; from rigctl.engines import environment as e; e._stamp = stamp;")
    full = 'def stamp(*_): raise OSError(28, "No space left on device", "kimi-rig.json")\n' + full
    refused(host, host.build("new", code=full), "kimi-rig.json: No space left on device")


def kill_when(command: list[str], seen: Any) -> int:
    """Kill the process group once `seen()` holds; its exit code."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "files/hostkit")}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    end = time.monotonic() + 60
    while not seen():
        assert process.poll() is None and time.monotonic() < end, "it was over before the point was reached"
    os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def test_killed_in_the_middle_of_the_install(host: Host) -> None:
    new = host.environment("new")
    assert kill_when(host.command("new"), lambda: any(new.glob("lib/python3*/site-packages/engine"))) != 0
    assert new.exists() and not (new / STAMP).exists(), "half-made, and it does not count"
    assert (host.answer("old"), host.findings("old")) == ("2", [])
    again = host.build("new")
    assert again.returncode == 0 and "is half-made: making it anew" in again.stdout
    assert (host.answer("new"), host.findings("new")) == ("2", [])


# The process dies right after the first of two files has been replaced, and right before the stamp is in place.
IN_PATCHING = "from rigctl.engines import patches; patches._replace = lambda *_: os.kill(os.getpid(), 9)"
BEFORE_STAMP = "from rigctl.engines import environment; environment.os.sync = lambda: os.kill(os.getpid(), 9)"


@pytest.mark.parametrize("point", [IN_PATCHING, BEFORE_STAMP], ids=["patching", "stamp"])
def test_killed_in_the_middle_of_patching_and_before_it_counts(host: Host, point: str) -> None:
    killed = host.build("new", code=f"import os; {point}; {RIGCTL}")
    assert killed.returncode == -signal.SIGKILL
    assert host.environment("new").exists() and not (host.environment("new") / STAMP).exists()
    assert (host.answer("old"), host.findings("old")) == ("2", [])
    again = host.build("new")
    assert again.returncode == 0 and "making it anew" in again.stdout
    assert (host.answer("new"), host.findings("new")) == ("2", [])


def test_a_hand_edited_engine_file_is_found_and_not_patched_over(host: Host) -> None:
    [site] = host.environment("old").glob("lib/python3*/site-packages")
    edited = site / "engine/second.py"
    content = edited.read_text()
    edited.unlink()
    edited.write_text("SECOND = 2  # by hand\n")
    assert any("engine/second.py" in finding for finding in host.findings("old"))
    check = ["drift", "check", "--env", str(host.environment("old"))]
    quick = run([sys.executable, "-c", RIGCTL, *check])
    assert quick.returncode == 1
    assert "engine/second.py: changed since it was proved" in quick.stdout
    with pytest.raises(RigctlError, match=r"nothing changed in (.*\n)*.*engine/second\.py"):
        patches.apply(site, host.series)
    assert edited.read_text() != content


def test_a_wheel_directory_and_no_network_at_all(host: Host) -> None:
    """In a network namespace without a route, not even to itself; the cache is empty."""
    alone = ["unshare", "--net", "--", *host.command("alone", base=host.root / "elsewhere")]
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("a network namespace cannot be made here: it takes root")
    routes = run(["unshare", "--net", "--", "cat", "/proc/net/route"]).stdout.splitlines()
    assert len(routes) <= 1, "there is a route"
    built = run(alone)
    assert built.returncode == 0, built.stderr
    assert host.findings("alone", host.root / "elsewhere") == []
    # Without the directory the same build has nowhere to go, and says so.
    shutil.move(host.wheels, host.root / "gone")
    third = host.root / "third"
    refused(
        host, run(["unshare", "--net", "--", *host.command("new", base=third)]), "could not be installed", base=third
    )
