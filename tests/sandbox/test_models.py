"""Models of other families beside Kimi on the real engine: what they say, what is counted, what the canary catches."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from rigctl.contract import layout
from rigctl.tiny_models import glm, kimi, qwen3
from tests.sandbox.conftest import DeployBox
from tests.support.box import OVERLAY
from tests.support.tiny_models import PLAIN, PREDICTED, SAID_AGAIN

pytestmark = pytest.mark.long

KIMI, GLM, QWEN3 = "vllm-base", "tiny-glm-mtp", "tiny-qwen3-ngram"
TEMPLATE = "/etc/wrong-template.jinja"
WEIGHTS = """
import os, sys
sys.path.insert(0, "{code}")
from rigctl.tiny_models.numbers import safetensors_bytes
from rigctl.tiny_models.qwen3 import QWEN3, tensors
found = {{name: values.copy() for name, values in tensors().items()}}
{change}
path = "/shared/tiny-qwen3/model.safetensors"
proved = os.stat(path)
with open(path, "r+b") as stream:
    stream.write(safetensors_bytes(found))
os.utime(path, ns=(proved.st_atime_ns, proved.st_mtime_ns))
"""
SWAPPED_WORDS = """
one, other = map(QWEN3.id_of, (" paragraph", " yardstick:"))
found["lm_head.weight"][[one, other]] = found["lm_head.weight"][[other, one]]
"""
ZERO_NORM = 'found["model.norm.weight"][:] = 0'
UID = """
import os, socket
def f():
    try:
        socket.create_connection(("127.0.0.1", 22), 2)
    except OSError:
        return os.getuid()
"""


def deploy(box: DeployBox) -> None:
    done = box.deploy()
    assert done.returncode == 0, done.stdout + done.stderr


def start(box: DeployBox, *configurations: str) -> None:
    box.ssh(f"systemctl start {' '.join(map(layout.unit_name, configurations))}")


@pytest.fixture(scope="module")
def box(bare_box: DeployBox, engine_port: None) -> Iterator[DeployBox]:
    """Three engines that share neither port nor card."""
    box = DeployBox(bare_box.box.name, "inventory/sandbox_models.py")
    deploy(box)
    start(box, KIMI, GLM, QWEN3)
    yield box
    box.ssh("systemctl stop 'kimi-tiny-*' 'kimi-vllm-*'")


def asked(box: DeployBox, configuration: str, question: str) -> dict[str, Any]:
    command = f"rigctl chat --json --configuration {configuration} {shlex.quote(question)}"
    answer: dict[str, Any] = json.loads(box.ssh(command).stdout)
    return answer


def weights(box: DeployBox, change: str = "") -> None:
    """Other tensors in the file of the tiny Qwen3, with the size, time and inode that were proved; its own without."""
    script = WEIGHTS.format(code=f"{layout.HOSTKIT}/current", change=change)
    box.ssh(f"{layout.HOSTKIT}/current/venv/bin/python -I -c {shlex.quote(script)}")


def verified(box: DeployBox) -> str:
    """What `make verify` says of the canary; no warning is a failure."""
    host = ("tests/host", "--inventory", box.inventory, "-k", "canary")
    verify = box.run("pytest", "-q", "-p", "no:cacheprovider", *host)
    assert verify.returncode == 0, verify.stdout + verify.stderr
    return verify.stdout


def counted(box: DeployBox, configuration: str, question: str, case: str) -> None:
    """An answer, and the counters that were written down before the engine was asked."""
    answer, expected = asked(box, configuration, question), PREDICTED[case]
    assert (answer["drafted"], answer["accepted"]) == (expected.draft_tokens, expected.accepted)
    assert answer["content"].strip() == (glm if case.startswith("glm") else qwen3).CONTENT


def test_three_families_beside_each_other_answer(box: DeployBox) -> None:
    """All were accepted, with reasoning, tool call and drafts of their own; status, chat and make status say which."""
    shown = box.ssh("rigctl status").stdout
    for name, path, port in ((KIMI, "kimi-k2.5-int4", 18000), (GLM, "tiny-glm", 18002), (QWEN3, "tiny-qwen3", 18001)):
        assert re.search(rf"active +{name} .*\n +\S*/{path} at 127\.0\.0\.1:{port}\n", shown), shown
    which = box.ssh("rigctl chat Hello", check=False)
    assert which.returncode == 1 and all(name in which.stderr for name in (KIMI, GLM, QWEN3))
    for name, says in ((KIMI, kimi.CONTENT), (GLM, glm.CONTENT), (QWEN3, qwen3.CONTENT)):
        assert asked(box, name, PLAIN)["content"].split() == says.split()
    status = box.run("rig", "status", box.inventory)
    assert all(name in status.stdout for name in (KIMI, GLM, QWEN3)), status.stdout + status.stderr


def test_counters_are_as_predicted(box: DeployBox) -> None:
    counted(box, GLM, PLAIN, "glm-half/chat/3")
    counted(box, QWEN3, SAID_AGAIN, "qwen3/repeated/3")
    counted(box, QWEN3, PLAIN, "qwen3/plain/3")


def test_the_canary_passes_on_each(box: DeployBox) -> None:
    for name in (KIMI, GLM, QWEN3):
        assert box.ssh(f"rigctl canary {name}", check=False).returncode == 64, "there is no baseline yet"
        made = box.ssh(f"rigctl canary {name} --baseline", check=False)
        assert made.returncode == 0, made.stdout + made.stderr
        assert "score 1.00" in made.stdout
    outcome = json.loads(box.ssh(f"rigctl canary {GLM} --json").stdout)
    assert outcome["verdict"] == "same" and outcome["run"]["settings"]["method"] == "mtp"
    assert "warning" not in verified(box)


def test_code_of_a_model_is_run_by_nobody_who_serves(box: DeployBox) -> None:
    """As the builder, without a network: root asks for it, and neither root nor the engines' user runs it."""
    ask = f"import sys; sys.path.insert(0, '{layout.HOSTKIT}/current'); "
    ask += f"from rigctl.services.canary_checks import values; print(values({UID!r}, ['f()']))"
    said = box.ssh(f"{layout.HOSTKIT}/current/venv/bin/python -I -c {shlex.quote(ask)}").stdout
    builder = box.ssh(f"id -u {layout.BUILDER}").stdout.strip()
    assert said.strip() == f"[{builder}]" and builder not in ("0", box.ssh("id -u kimi").stdout.strip())


def test_the_canary_catches_swapped_weights(box: DeployBox) -> None:
    """Fluent, and wrong in two words: the engine is accepted."""
    try:
        weights(box, SWAPPED_WORDS)
        box.ssh(f"systemctl restart {layout.unit_name(QWEN3)}")
        canary = box.ssh(f"rigctl canary {QWEN3}", check=False)
        assert canary.returncode == 1, canary.stdout + canary.stderr
        assert "canary: worse" in canary.stdout and "answer is another" in canary.stdout
        assert f"warning: sandbox: the quality canary of {QWEN3} was worse: " in verified(box)
    finally:
        weights(box)
    box.ssh(f"systemctl restart {layout.unit_name(QWEN3)}")
    assert "canary: same" in box.ssh(f"rigctl canary {QWEN3}").stdout


def test_a_model_with_a_zero_norm_is_not_accepted(box: DeployBox) -> None:
    """Of no help to anyone, so it is never served, and the canary has nobody to ask."""
    try:
        weights(box, ZERO_NORM)
        assert box.ssh(f"systemctl restart {layout.unit_name(QWEN3)}", check=False).returncode
        assert "is degenerate: it is one character repeated" in box.ssh("rigctl status").stdout
        asked = box.ssh(f"rigctl canary {QWEN3}", check=False)
        assert asked.returncode == 64 and "is not active" in asked.stdout
    finally:
        box.ssh(f"systemctl stop {layout.unit_name(QWEN3)}")
        weights(box)


@pytest.mark.parametrize("drafts", ["always", "never"])
def test_all_or_none_of_a_heads_drafts_are_accepted(box: DeployBox, drafts: str) -> None:
    start(box, f"tiny-glm-mtp-{drafts}")
    counted(box, f"tiny-glm-mtp-{drafts}", PLAIN, f"glm-{drafts}/chat/3")


def test_the_canary_catches_a_wrong_chat_template(box: DeployBox) -> None:
    """One that cannot turn the thinking off comes with a flag, and the engine is accepted all the same."""
    before = OVERLAY.read_text()
    box.ssh(f"sed 's/enable_thinking == false/false/' /shared/tiny-qwen3/chat_template.jinja > {TEMPLATE}")
    flags = "      flags: {dtype: bfloat16, enforce-eager: true}"
    try:
        OVERLAY.write_text(before.replace(flags, f"{flags[:-1]}, chat-template: {TEMPLATE}}}"))
        box.ssh("systemctl stop 'kimi-tiny-*' 'kimi-vllm-*'")
        deploy(box)
        start(box, QWEN3)
        canary = box.ssh(f"rigctl canary {QWEN3}", check=False)
        assert canary.returncode == 1 and "canary: worse" in canary.stdout, canary.stdout + canary.stderr
        assert re.search("^thinking-off +0%", canary.stdout, re.MULTILINE), canary.stdout
        assert "CANARY WORSE: " in box.ssh("rigctl status").stdout
        assert f"the quality canary of {QWEN3} was worse: " in verified(box)
    finally:
        OVERLAY.write_text(before)
        box.ssh(f"rm {TEMPLATE}")
