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
UID = """
import os, socket
def f():
    try:
        socket.create_connection(("127.0.0.1", 22), 2)
    except OSError:
        return os.getuid()
"""


def deployed(box: DeployBox, *configurations: str) -> None:
    """A box that has these, and runs them: three engines that share neither port nor card."""
    deploy = box.deploy("--pyinfra=--data", f"--pyinfra=configurations={json.dumps(configurations)}")
    assert deploy.returncode == 0, deploy.stdout + deploy.stderr
    box.ssh(f"systemctl start {' '.join(map(layout.unit_name, configurations))}")


@pytest.fixture(scope="module")
def box(bare_box: DeployBox, engine_port: None) -> Iterator[DeployBox]:
    deployed(bare_box, KIMI, GLM, QWEN3)
    yield bare_box
    bare_box.ssh("systemctl stop 'kimi-tiny-*' 'kimi-vllm-*'")
    assert bare_box.deploy().returncode == 0


def asked(box: DeployBox, configuration: str, question: str) -> dict[str, Any]:
    command = f"rigctl chat --json --configuration {configuration} {shlex.quote(question)}"
    answer: dict[str, Any] = json.loads(box.ssh(command).stdout)
    return answer


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
    verify = box.run(
        "pytest", "-q", "-p", "no:cacheprovider", "tests/host", "--inventory", box.inventory, "-k", "canary"
    )
    assert verify.returncode == 0 and "warning" not in verify.stdout, verify.stdout


def test_code_of_a_model_is_run_by_nobody_who_serves(box: DeployBox) -> None:
    """As the builder, without a network: root asks for it, and neither root nor the engines' user runs it."""
    ask = f"import sys; sys.path.insert(0, '{layout.HOSTKIT}/current'); "
    ask += f"from rigctl.services.canary_checks import values; print(values({UID!r}, ['f()']))"
    said = box.ssh(f"{layout.HOSTKIT}/current/venv/bin/python -I -c {shlex.quote(ask)}").stdout
    builder = box.ssh(f"id -u {layout.BUILDER}").stdout.strip()
    assert said.strip() == f"[{builder}]" and builder not in ("0", box.ssh("id -u kimi").stdout.strip())


def test_the_canary_catches_a_wrong_chat_template(box: DeployBox) -> None:
    """One that cannot turn the thinking off comes with a flag, and the engine is accepted all the same."""
    before = OVERLAY.read_text()
    box.ssh(f"sed 's/enable_thinking == false/false/' /shared/tiny-qwen3/chat_template.jinja > {TEMPLATE}")
    flags = "      flags: {dtype: bfloat16, enforce-eager: true}"
    try:
        OVERLAY.write_text(before.replace(flags, f"{flags[:-1]}, chat-template: {TEMPLATE}}}"))
        box.ssh(f"systemctl stop {layout.unit_name(GLM)} {layout.unit_name(KIMI)} {layout.unit_name(QWEN3)}")
        deployed(box, QWEN3)
        canary = box.ssh(f"rigctl canary {QWEN3}", check=False)
        assert canary.returncode == 1 and "canary: worse" in canary.stdout, canary.stdout + canary.stderr
        assert re.search("^thinking-off +0%", canary.stdout, re.MULTILINE), canary.stdout
        assert "CANARY WORSE: " in box.ssh("rigctl status").stdout
    finally:
        OVERLAY.write_text(before)
        box.ssh(f"rm {TEMPLATE}")


@pytest.mark.parametrize("drafts", ["always", "never"])
def test_all_or_none_of_a_heads_drafts_are_accepted(box: DeployBox, drafts: str) -> None:
    box.ssh("systemctl stop 'kimi-tiny-*' 'kimi-vllm-*'")
    deployed(box, f"tiny-glm-mtp-{drafts}")
    counted(box, f"tiny-glm-mtp-{drafts}", PLAIN, f"glm-{drafts}/chat/3")
