"""The whole main job on a real machine: deploy, converge, verify, serve, tamper, repair. In this order, on one box."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import requests

from rig.catalog.entries import ROOT
from rigctl.contract import layout
from rigctl.tiny_models.kimi import CONTENT
from tests.sandbox.conftest import DeployBox
from tests.support.box import OVERLAY, PORT, drafted_a_step, overlay_with

TAMPERED = [
    # (what is done to the box, what verification must name, what the plan must name)
    (
        "echo '# mine' >> /etc/systemd/system/kimi-vllm-base.service",
        "kimi-vllm-base.service: content differs",
        "kimi-vllm-base.service: content differs",
    ),
    ("chmod 0777 /opt/kimi-rig", "/opt/kimi-rig: 0777", "/opt/kimi-rig: mode 0777 (not 0755)"),
    (
        "chown kimi /etc/kimi-rig/locks",
        "/etc/kimi-rig/locks: 0755 kimi:root",
        "/etc/kimi-rig/locks: owner kimi (not root)",
    ),
    (
        "echo '# mine' >> /opt/kimi-rig/hostkit/current/rigctl/cli.py",
        "rigctl/cli.py: content differs",
        "was changed on the host and is installed again",
    ),
    ("rm /usr/local/bin/rigctl", "/usr/local/bin/rigctl is missing", "/usr/local/bin/rigctl is missing"),
    ("apt-get purge -qqy rsync >/dev/null 2>&1", "packages are missing: rsync", "packages to install: rsync"),
    (
        f"printf '{layout.UNIT_MARK}\\n[Service]\\nExecStart=true\\n' > /etc/systemd/system/kimi-old.service",
        "units of no configuration: kimi-old.service",
        "kimi-old.service: its configuration is gone",
    ),
    ("systemctl enable -q kimi-vllm-base", "start at boot", "kimi-vllm-base.service is no longer started at boot"),
]


STRANGER = f"""
import urllib.error, urllib.request
try:
    print(urllib.request.urlopen("http://127.0.0.1:{PORT}/v1/models").status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


EDGE_PORT = PORT + 443


def option_words(option: tuple[str, ...]) -> list[str]:
    """pyinfra's own options, of those that a wrapper hands on."""
    return [word.removeprefix("--pyinfra=") for word in option]


def pyinfra(box: DeployBox, *options: str) -> dict[str, Any]:
    """A plain pyinfra run, as its own documentation says; its JSON results."""
    result = box.run("pyinfra", *options, "inventory/sandbox.py", "deploy.py", "--json", "-y")
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def box(bare_box: DeployBox, engine_port: None) -> DeployBox:
    """The box after a deploy that was killed twice on its way."""
    for seconds in (6, 25):
        command = [sys.executable, "-m", "rig", "deploy", "-v", "inventory/sandbox.py"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    deploy = bare_box.deploy()
    assert deploy.returncode == 0, deploy.stdout + deploy.stderr
    assert deploy.stdout.strip().endswith("converged: sandbox")
    return bare_box


def test_a_second_deploy_changes_nothing(box: DeployBox) -> None:
    totals = pyinfra(box)
    changed = [row for row in totals["results"]["operations"] if row["success"]]
    assert not changed, f"changed again: {changed}"


def test_the_plan_after_a_deploy_is_empty(box: DeployBox) -> None:
    plan = box.plan()
    assert plan.returncode == 0, plan.stdout + plan.stderr
    assert plan.stdout.splitlines()[0] == "sandbox: nothing to do"
    [account] = re.findall(r"^  disk /: .* free of .*; ours: (.*)$", plan.stdout, re.MULTILINE)
    assert re.search(r"environment \d\.\d GB", account) and "a deploy adds" not in plan.stdout


def test_verification_passes(box: DeployBox) -> None:
    verify = box.verify()
    assert verify.returncode == 0, verify.stdout
    assert "set, not enforced in this box: MemoryMax" in verify.stdout


def test_the_good_drafter_serves(box: DeployBox) -> None:
    """Acceptance, one real answer, and every drafted token accepted by the engine's own counters."""
    box.ssh("systemctl start kimi-vllm-eagle3-custom")
    answer = json.loads(box.ssh("rigctl chat --json 'What is a token?'").stdout)
    assert answer["configuration"] == "vllm-eagle3-custom"
    assert answer["content"].split() == "".join(CONTENT).split()
    assert answer["drafted"] == answer["accepted"] > 0
    assert answer["acceptance_length"] == 1 + drafted_a_step("vllm-eagle3-custom")
    [row] = [row for row in json.loads(box.ssh("rigctl status --json").stdout) if row["state"] == "active"]
    assert (row["name"], row["stale"]) == ("vllm-eagle3-custom", False)
    proved = row["started"]["proved"]["speculation"]
    assert proved["drafted"] == proved["accepted"] > 0


def test_verification_passes_while_serving(box: DeployBox) -> None:
    verify = box.verify()
    assert verify.returncode == 0, verify.stdout


def test_the_engine_runs_as_the_service_user_on_loopback_only(box: DeployBox) -> None:
    pid = box.ssh("systemctl show -P MainPID kimi-vllm-eagle3-custom").stdout.strip()
    assert box.ssh(f"ps -o user= -p {pid}").stdout.strip() == "kimi"
    addresses = re.findall(r"(\S+):\d+\s+\S+\s+users:\(\(\"(?:python|VLLM)", box.ssh("ss -Hltnp").stdout)
    assert addresses and all(address.startswith("127.") for address in addresses), addresses


def test_a_changed_configuration_makes_the_running_service_stale_and_is_not_lost(box: DeployBox) -> None:
    """A deploy interrupts nothing by itself; status and verification say that the service is stale."""
    before = OVERLAY.read_text()
    started = box.ssh("systemctl show -P MainPID kimi-vllm-eagle3-custom").stdout
    try:
        OVERLAY.write_text(overlay_with(limit=4))
        assert box.deploy().returncode == 0
        assert box.ssh("systemctl show -P MainPID kimi-vllm-eagle3-custom").stdout == started
        assert "STALE" in box.ssh("rigctl status").stdout
        verify = box.verify()
        assert verify.returncode != 0 and "is stale" in verify.stdout
    finally:
        OVERLAY.write_text(before)
    assert box.deploy().returncode == 0
    assert "STALE" not in box.ssh("rigctl status").stdout


def test_a_switch_stops_the_other_and_the_base_serves(box: DeployBox) -> None:
    box.ssh("systemctl start kimi-vllm-base")
    assert box.ssh("systemctl is-active kimi-vllm-eagle3-custom", check=False).stdout.strip() == "inactive"
    answer = json.loads(box.ssh("rigctl chat --json 'What is a token?'").stdout)
    assert (answer["configuration"], answer["drafted"]) == ("vllm-base", None)
    assert answer["content"].split() == "".join(CONTENT).split()


def test_the_bad_drafter_is_told_by_its_counters(box: DeployBox) -> None:
    box.ssh("systemctl start kimi-vllm-eagle3-aq-medai")
    answer = json.loads(box.ssh("rigctl chat --json 'What is a token?'").stdout)
    assert answer["content"].split() == "".join(CONTENT).split(), "a bad drafter must not change the answer"
    assert answer["drafted"] > 0 and answer["accepted"] == 0
    box.ssh("systemctl stop kimi-vllm-eagle3-aq-medai")
    assert not box.ssh("pgrep -u kimi", check=False).stdout, "processes outlived their unit"


def test_tampering_is_named_and_repaired(box: DeployBox) -> None:
    for command, _, _ in TAMPERED:
        box.ssh(command)
    verify, plan = box.verify(), box.plan()
    assert verify.returncode == 1 and plan.returncode == 2
    for command, in_verify, in_plan in TAMPERED:
        assert in_verify in verify.stdout, f"verification does not name: {command}\n{verify.stdout}"
        assert in_plan in plan.stdout, f"the plan does not name: {command}\n{plan.stdout}"
    deploy = box.deploy()
    assert deploy.returncode == 0, deploy.stderr
    assert box.verify().returncode == 0


@pytest.mark.parametrize(("language", "directory"), [("de_DE", "verzeichnis"), ("tr_TR", "dizin")])
def test_a_host_that_speaks_another_language(box: DeployBox, language: str, directory: str) -> None:
    """Its programs do, for whoever logs in; what we read of them is English, and a dotless i is another letter."""
    box.ssh(
        "command -v localedef >/dev/null && [ -e /usr/share/i18n ] || apt-get install -qqy locales >/dev/null 2>&1; "
        f"localedef -i {language} -f UTF-8 {language}.UTF-8; echo LANG={language}.UTF-8 > /etc/default/locale"
    )
    try:
        assert directory in box.ssh("stat -c %F /etc").stdout.lower(), "the login speaks it"
        box.ssh("chmod 0777 /opt/kimi-rig; rm /usr/local/bin/rigctl; apt-get purge -qqy rsync >/dev/null 2>&1")
        plan = box.plan()
        assert plan.returncode == 2 and "/opt/kimi-rig: mode 0777 (not 0755)" in plan.stdout, plan.stdout + plan.stderr
        deploy = box.deploy()
        assert deploy.returncode == 0, deploy.stdout + deploy.stderr
        verify = box.verify()
        assert verify.returncode == 0, verify.stdout
        status = box.run("rig", "status", box.inventory)
        assert status.returncode == 0 and "drift: none" in status.stdout, status.stdout + status.stderr
    finally:
        box.ssh("rm -f /etc/default/locale")


def test_a_package_lost_from_an_environment_is_named(box: DeployBox) -> None:
    packages = box.ssh("ls -d /opt/kimi-rig/env/vllm-cpu-*/current/lib/python3*/site-packages").stdout.strip()
    box.ssh(f"mv {packages}/xgrammar-*.dist-info /root/")
    verify = box.verify()
    assert verify.returncode == 1 and "xgrammar missing" in verify.stdout
    box.ssh(f"mv /root/xgrammar-*.dist-info {packages}/")


def test_one_deploy_at_a_time(box: DeployBox) -> None:
    """A second deploy is refused with owner and age, while the first still holds the host."""
    query = "/usr/bin/dpkg-query"
    box.ssh(f"rm -f /usr/local/bin/rigctl; mv {query} {query}.real")
    box.ssh(f"printf '#!/bin/sh\\nsleep 4\\nexec {query}.real \"$@\"\\n' > {query}; chmod +x {query}")
    first = subprocess.Popen(
        [sys.executable, "-m", "rig", "deploy", "-v", "inventory/sandbox.py"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    try:
        time.sleep(3)
        second = box.deploy()
        assert second.returncode == 1
        assert re.search(
            r"another deploy is at work on this host: .+@.+ \(process \d+\) since .+, for \d+ s", second.stderr
        )
    finally:
        box.ssh(f"mv -f {query}.real {query}")
        assert first.wait(120) == 0, "the refused one must not disturb the first"
    assert box.deploy().returncode == 0


def test_a_pending_reboot_is_exit_3_and_nothing_serves(box: DeployBox) -> None:
    override = ("--pyinfra=--data", '--pyinfra=host_overrides={"kernel_argument.iommu": "pt"}')
    noted = box.deploy(*override)
    assert noted.returncode == 0, "no reboot of a container brings a kernel argument"
    # From here on the box says that it is a machine, and that grub boots it.
    detect, grub = "/usr/bin/systemd-detect-virt", "/usr/sbin/update-grub"
    box.ssh(f"mv {detect} {detect}.real && printf '#!/bin/sh\\necho none\\nexit 1\\n' > {detect} && chmod 755 {detect}")
    box.ssh("mkdir -p /boot/grub && touch /boot/grub/grub.cfg")
    written = "cat /etc/default/grub.d/*.cfg > /boot/grub/grub.cfg 2>/dev/null; true"
    box.ssh(f"printf '#!/bin/sh\\n{written}\\n' > {grub} && chmod 755 {grub}")
    try:
        deploy = box.deploy(*override)
        assert deploy.returncode == 3, deploy.stderr
        assert "sandbox: reboot pending: kernel_argument.iommu = pt" in deploy.stdout
        assert box.plan(*override).returncode == 3
        refused = box.ssh("systemctl start kimi-vllm-base", check=False)
        assert refused.returncode != 0 and "Assertion failed" in refused.stderr
    finally:
        box.ssh(f"mv -f {detect}.real {detect}")
    assert box.deploy().returncode == 0, "without the override nothing waits for a reboot"
    box.ssh(f"rm -r /boot/grub {grub}")
    assert box.plan().returncode == 0


def test_secrets_reach_the_host_and_show_nowhere(box: DeployBox, tmp_path: Path) -> None:
    secret = "key-0fd1-never-shown"
    file = tmp_path / "api-key"
    file.write_text(f"{secret}\n")
    option = f"api_key_file={file}"
    open_to_all = box.run("pyinfra", "--data", option, "inventory/sandbox.py", "deploy.py", "-y")
    assert open_to_all.returncode == 1 and f"run `chmod 600 {file}`" in open_to_all.stderr
    file.chmod(0o600)
    spy = subprocess.Popen(
        box.box.ssh_command(
            "for i in $(seq 200); do cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '; sleep 0.05; done"
        ),
        stdout=subprocess.PIPE,
        text=True,
    )
    loud = box.run("pyinfra", "-vvv", "--debug", "--diff", "--data", option, "inventory/sandbox.py", "deploy.py", "-y")
    assert loud.returncode == 0, loud.stderr
    assert secret not in loud.stdout + loud.stderr
    seen = spy.communicate()[0]
    assert "base64 -d" in seen, "the spy saw nothing of the deploy"
    assert secret not in seen
    stored = box.ssh(f"cat {layout.CREDENTIALS}/api-key; stat -c '%a %U' {layout.CREDENTIALS}/api-key").stdout
    assert stored == f"{secret}600 root\n"
    assert secret not in box.ssh(f"cat {layout.RECEIPT} {layout.UNITS}/kimi-*.service").stdout
    assert f"LoadCredential=api-key:{layout.CREDENTIALS}/api-key" in box.ssh("systemctl cat kimi-vllm-base").stdout
    again = pyinfra(box, "--data", option)
    assert not [row for row in again["results"]["operations"] if row["success"]]


def test_an_engine_with_a_key_refuses_strangers(box: DeployBox) -> None:
    box.ssh("systemctl start kimi-vllm-base")
    assert box.ssh(f"python3 -c {shlex.quote(STRANGER)}").stdout.strip() == "401"
    assert json.loads(box.ssh("rigctl chat --json Hello").stdout)["content"]
    arguments = box.ssh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
    assert "api_server" in arguments and "key-0fd1" not in arguments
    box.ssh("systemctl stop kimi-vllm-base")
    assert box.deploy().returncode == 0, "without the key in the data the unit no longer asks for it"


def test_others_reach_the_engine_through_the_edge(box: DeployBox, tmp_path: Path) -> None:
    """By TLS of the host's own authority, with a key that the host has the digest of; revoked, it is refused."""
    keys = {}
    for name in ("alice", "bob"):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(f"{name}-0fd1-never-shown")
        keys[name] = str(tmp_path / name)
    tls = {"authority": ["localhost", "127.0.0.1"]}
    edge = {"address": "127.0.0.1", "port": EDGE_PORT, "tls": tls, "keys": keys}
    option = ("--pyinfra=--data", f"--pyinfra=edge={json.dumps(edge)}")
    deploy = box.deploy(*option)
    assert deploy.returncode == 0, deploy.stdout + deploy.stderr
    assert not [row for row in pyinfra(box, *option_words(option))["results"]["operations"] if row["success"]]
    authority = tmp_path / "authority.pem"
    authority.write_text(box.ssh(f"cat {layout.EDGE}/authority.pem").stdout)

    def ask(key: str | None, **more: Any) -> requests.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"https://localhost:{EDGE_PORT}/v1/{'chat/completions' if more else 'models'}"
        method = "POST" if more else "GET"
        return requests.request(method, url, headers=headers, verify=str(authority), timeout=120, **more)

    key, other = "alice-0fd1-never-shown", "bob-0fd1-never-shown"
    assert (ask(None).status_code, ask(key).status_code) == (401, 503), "nothing is started yet"
    box.ssh("systemctl start kimi-vllm-eagle3-custom")
    model = ask(other).json()["data"][0]["id"]
    question = {"model": model, "messages": [{"role": "user", "content": "What is a token?"}], "max_tokens": 64}
    words = ask(key, json=question).json()["choices"][0]["message"]
    assert (words["content"] or words["reasoning"]).strip()
    with ask(key, json={**question, "stream": True}, stream=True) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert len(lines) > 3 and lines[-1] == b"data: [DONE]"
    said = box.ssh(f"cat {layout.EDGE}/* /proc/[0-9]*/cmdline; journalctl -q -o cat -u kimi-edge", check=False).stdout
    assert "key=alice" in said and "never-shown" not in said
    security = box.ssh("systemd-analyze security --no-pager kimi-edge.service | tail -n 1").stdout
    assert float(re.findall(r"exposure level for kimi-edge.service: (\S+)", security)[0]) <= 2.0, security
    assert box.ssh("systemctl is-active haproxy", check=False).stdout.strip() == "inactive"
    del keys["bob"]
    option = ("--pyinfra=--data", f"--pyinfra=edge={json.dumps(edge)}")
    started = box.ssh("systemctl show -P InvocationID kimi-edge kimi-vllm-eagle3-custom").stdout
    assert box.deploy(*option).returncode == 0
    assert (ask(other).status_code, ask(key).status_code) == (401, 200)
    assert box.ssh("systemctl show -P InvocationID kimi-edge kimi-vllm-eagle3-custom").stdout == started, "restarted"
    inventory = ROOT / "inventory/group_data/sandbox.py"
    before = inventory.read_text()
    try:
        inventory.write_text(f"{before}edge = {edge!r}\n")
        verify = box.verify()
        assert verify.returncode == 0, verify.stdout
    finally:
        inventory.write_text(before)
    box.ssh("systemctl stop kimi-vllm-eagle3-custom")
    assert box.deploy().returncode == 0, "without it in the data the edge goes"
    assert box.ssh("systemctl is-active kimi-edge", check=False).stdout.strip() == "inactive"


def test_a_rollback_brings_the_edge_back(box: DeployBox) -> None:
    """With the keys and the certificate that the host has, which is renewed again."""
    timer = "kimi-edge-certificate.timer"
    seen = f"systemctl is-active kimi-edge {timer}; systemctl is-enabled {timer}"
    curl = f"curl -sS -w '%{{http_code}}\\n' -o /dev/null --cacert {layout.EDGE}/authority.pem"
    curl += f" https://localhost:{EDGE_PORT}/v1/models -H 'Authorization: Bearer"
    assert box.ssh(seen, check=False).stdout.split()[:2] == ["inactive"] * 2
    back = box.run("rig", "rollback", box.inventory)
    assert back.returncode == 0, back.stdout + back.stderr
    assert box.ssh(seen).stdout.split() == ["active", "active", "enabled"]
    asked = [box.ssh(f"{curl} {name}-0fd1-never-shown'").stdout.strip() for name in ("alice", "bob")]
    assert asked == ["503", "401"], "no engine runs, and what was revoked stays so"
    again = box.deploy("--pyinfra=--data", "--pyinfra=roll_forward=yes")
    assert again.returncode == 0, again.stdout + again.stderr
    assert box.ssh(seen, check=False).stdout.split()[:2] == ["inactive"] * 2


def test_a_catalogue_entry_that_goes_takes_its_unit_along(box: DeployBox) -> None:
    fewer = box.run("pyinfra", "--data", 'configurations=["vllm-base"]', "inventory/sandbox.py", "deploy.py", "-y")
    assert fewer.returncode == 0, fewer.stderr
    left = box.ssh("ls /etc/systemd/system | grep ^kimi-vllm").stdout.split()
    assert left == ["kimi-vllm-base.service"]
    assert box.deploy().returncode == 0
    assert box.verify().returncode == 0
