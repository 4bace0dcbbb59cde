"""The benchmark's report in a real browser: nothing on the console, nothing from a network, every number in the ledger.

pytest tests/browser
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rig.bench import ledger, report
from tests.unit.bench_results import made_result

pytestmark = pytest.mark.browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def chromium(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM, "tests/browser needs Chromium (Debian/Ubuntu: apt-get install chromium)"
    profile = page.parent / "profile"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=3000", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


def console(page: Path) -> list[str]:
    """What the page said on the console: errors, warnings and messages alike."""
    return [line for line in chromium(page, "--dump-dom").stderr.splitlines() if "CONSOLE" in line]


class Numbers(HTMLParser):
    """Every <data> element: entry, key, value attribute and text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, str]] = []
        self._open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "data":
            self._open = True
            self.found.append({name: value or "" for name, value in attrs} | {"text": ""})

    def handle_data(self, data: str) -> None:
        if self._open:
            self.found[-1]["text"] += data

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open and tag != "data"


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger with the reported figures and two configurations whose lines cross; one is cold, one cell failed."""
    directory = tmp_path_factory.mktemp("ledger")
    shutil.copytree(ledger.DIRECTORY / "reference", directory / "reference")
    base = {1: [60.25, 61.5, 60.75], 8: [300.125, 305.5, 301.0], 64: [1500.5, 1490.25, 1495.75]}
    eagle = {1: [80.5, 120.25, 121.5, 122.75], 8: [410.5, 400.25, 405.0], 64: [900.5, 910.5, 905.25]}
    for concurrency, speeds in base.items():
        gpus = [{"name": str(n), "power_w": 400.5 + n, "clock_mhz": 2400.0, "memory_mib": 9e4} for n in range(8)]
        observed = {"running_max": concurrency, "waiting_max": 0, "kv_use_max": 0.125, "gpus": gpus}
        profile = {"all_reduce_share": 0.515, "kernel_seconds": 3.0}
        ledger.append(made_result("vllm-base", concurrency, speeds, observed=observed, profile=profile), directory)
    for concurrency, speeds in eagle.items():
        ledger.append(made_result("vllm-eagle3-custom", concurrency, speeds, length=2.4), directory)
    failed = made_result("vllm-base", 128, [], status="failed", cause='the engine ended <exit code 1> & "died"')
    ledger.append(failed, directory)
    return directory


@pytest.fixture(scope="module")
def page(entries: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write(ledger.read(entries), tmp_path_factory.mktemp("report"))[0]


def warm(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first, *later = [measured["output_tok_s"] for measured in rounds]
    cold = later and first < 0.9 * min(later) and min(later) - first > max(later) - min(later)
    return rounds[1:] if cold else rounds


def pick(value: Any, path: str) -> Any:
    for part in filter(None, path.split(".")):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


REDUCE: dict[str, Callable[[list[float]], float]] = {
    "median": statistics.median,
    "median-all": statistics.median,
    "min": min,
    "max": max,
    "sum": sum,
    "count": len,
}


def of_counters(rounds: list[dict[str, Any]], how: str) -> float:
    counted = [measured["counters"] for measured in rounds]
    over = {"length": "drafts", "rate": "drafted"}[how]
    share = sum(c["accepted"] for c in counted) / sum(c[over] for c in counted)
    return float(1 + share if how == "length" else 100 * share)


def of_position(rounds: list[dict[str, Any]], how: str) -> float:
    counted = [measured["counters"] for measured in rounds]
    return float(100 * sum(c["accepted_at"][int(how)] for c in counted) / sum(c["drafts"] for c in counted))


def of_gpus(rounds: list[dict[str, Any]], how: str) -> float:
    return float(max(sum(gpu[how] for gpu in measured["observed"]["gpus"]) for measured in rounds))


SPECIAL = {
    "rounds.counters": of_counters,
    "rounds.counters.accepted_at": of_position,
    "rounds.observed.gpus": of_gpus,
}


def expected(found: dict[str, str], by_id: dict[str, dict[str, Any]]) -> float:
    """The value that a key of an entry has, computed from the ledger's files alone."""
    entry, key = by_id[found["data-entry"]], found["data-key"]
    if match := re.fullmatch(r"(speedup|break-even) over (.+)", key):
        medians = [
            statistics.median(measured["output_tok_s"] for measured in warm(one["rounds"]))
            for one in (entry, by_id[match[2]])
        ]
        speedup = medians[0] / medians[1]
        return float(speedup if match[1] == "speedup" else of_counters(entry["rounds"], "length") / speedup)
    path, _, how = key.partition(":")
    if path.startswith("profile."):
        return float(100 * pick(entry, path))
    if not path.startswith("rounds."):
        return float(pick(entry, path))
    if path in SPECIAL:
        return float(SPECIAL[path](entry["rounds"], how))
    speed = path in ("rounds.output_tok_s", "rounds.stream_tok_s")
    rounds = warm(entry["rounds"]) if speed else entry["rounds"]
    return float(REDUCE[how]([pick(measured, path.removeprefix("rounds.")) for measured in rounds]))


def test_every_number_equals_the_ledger(page: Path, entries: Path) -> None:
    by_id = {entry["id"]: entry for path in entries.rglob("*.json") for entry in [json.loads(path.read_text())]}
    parser = Numbers()
    parser.feed(chromium(page, "--dump-dom").stdout)
    assert {found["data-entry"] for found in parser.found} >= set(by_id) - {"2026-02-sglang-eagle3-custom"}
    for found in parser.found:
        digits = len(found["text"].partition(".")[2])
        assert found["text"] == f"{expected(found, by_id):,.{digits}f}", found


def test_console_is_silent_and_the_check_can_fail(page: Path, tmp_path: Path) -> None:
    assert console(page) == []
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("</body>", '<img src="https://example.com/x.png"></body>'))
    assert any("Content Security Policy" in line for line in console(broken))


def test_cause_of_a_failure_is_text(page: Path) -> None:
    assert "the engine ended &lt;exit code 1&gt; &amp; &#34;died&#34;" in page.read_text()


def test_fits_a_phone(page: Path, tmp_path: Path) -> None:
    """Nothing but the tables' own boxes is wider than the screen."""
    probe = tmp_path / "probe.html"
    script = "<script>document.title = document.documentElement.scrollWidth + ' ' + innerWidth</script></body>"
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    probe.write_text(text.replace("</body>", script))
    title = re.search(r"<title>(\d+) (\d+)</title>", chromium(probe, "--dump-dom", "--window-size=500,900").stdout)
    assert title
    assert int(title[1]) <= int(title[2])


def test_a_picture_without_numbers_is_left_out(recwarn: pytest.WarningsRecorder) -> None:
    title = "Acceptance by position"
    assert title not in report.page([made_result("s", 1, [60, 61], length=2.4, engine="sglang")])
    assert title in report.page([made_result("v", 1, [60, 61], length=2.4)])
    assert not recwarn.list
