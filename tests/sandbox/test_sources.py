"""Checkpoints from a web directory and from another tree over SSH, by the deploy: shown, followed, never twice.

After test_deploy by name, which needs the box bare.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rig.catalog.entries import ROOT, forget_catalogs
from tests.sandbox.conftest import DeployBox
from tests.staging.hubserver import COMMIT, REPOSITORY, Hub
from tests.support.box import RELEASE
from tests.support.certificates import authority_file

OVERLAY = ROOT / "inventory" / "overlays" / "test-sources.yaml"
STAGE = [f"--data=catalogue_overlay={OVERLAY.name}", "inventory/sandbox.py", "tasks/checkpoints.py", "-y"]
RATE = 2_000_000
FILLER = 45 * RATE  # seconds for the commands between
STORE = """
set -e; rm -rf /srv/store /srv/web; mkdir -p /srv/store
rigctl tiny-model drafter-always /srv/store/custom; echo state > /srv/store/custom/training_state.pt
rigctl tiny-model drafter-never /srv/web; head -c {filler} /dev/zero > /srv/web/filler.bin
[ -e /root/.ssh/store ] || ssh-keygen -q -t ed25519 -N "" -f /root/.ssh/store
cd /root/.ssh; grep -qF "$(cat store.pub)" authorized_keys || cat store.pub >> authorized_keys
ssh-keyscan -p {port} 127.0.0.1 2>/dev/null > /root/.ssh/store_hosts
cp /etc/environment /root/environment.before
sed -i /^SSL_CERT_FILE=/d /etc/environment; echo SSL_CERT_FILE=/root/test-authorities.pem >> /etc/environment
"""


@pytest.fixture(scope="module")
def box(bare_box: DeployBox) -> Iterator[DeployBox]:
    """A deployed box with a store of drafters in it; back on its own catalogue afterwards."""
    first = bare_box.deploy()
    assert first.returncode == 0, first.stdout + first.stderr
    bare_box.ssh(STORE.format(filler=FILLER, port=os.environ["KIMI_RIG_SANDBOX_PORT"]))
    # As an operator names a certificate authority of his own to a host.
    others = Path(bare_box.box.root, "etc/ssl/certs/ca-certificates.crt")
    authorities = (others.read_text() if others.exists() else "") + authority_file().read_text()
    Path(bare_box.box.root, "root/test-authorities.pem").write_text(authorities)
    yield bare_box
    OVERLAY.unlink(missing_ok=True)
    for name in ("aq-medai-k2-drafter", "custom-drafter"):
        bare_box.ssh(f"rigctl checkpoints forget {name}", check=False)
    # All drafters: a made one without a record would have to be adopted.
    bare_box.ssh("rm -rf /data/eagle3/* /data/eagle3/.from-* /srv/store /srv/web /var/lib/kimi-rig/drafters")
    bare_box.ssh("mv /root/environment.before /etc/environment; rm /root/test-authorities.pem")
    last = bare_box.deploy()
    assert last.returncode == 0, last.stdout + last.stderr


@pytest.fixture(scope="module")
def web(box: DeployBox) -> Iterator[str]:
    """The web directory, by a server on the loopback that box and tests share."""
    hub = Hub(Path(box.box.root, "srv/web"))
    hub.manifest()
    yield f"{hub.address}/plain"
    hub.close()


def lay_hub(**source: object) -> None:
    """Write the overlay: one drafter from a hub."""
    content = yaml.safe_load((OVERLAY.parent / "sandbox.yaml").read_text())
    hub = {"kind": "hub", "repository": REPOSITORY, **source}
    content["checkpoints"]["aq-medai-k2-drafter"] |= {"path": "{drafters}/from-hub", "source": hub}
    OVERLAY.write_text(yaml.safe_dump(content))


def lay(web: str, **training: object) -> None:
    """Write the overlay: both drafters from elsewhere."""
    content = yaml.safe_load((OVERLAY.parent / "sandbox.yaml").read_text())
    content["checkpoints"]["aq-medai-k2-drafter"] |= {
        "path": "{drafters}/from-web",
        "source": {"kind": "http", "url": web},
        "bandwidth_limit": RATE,
    }
    content["checkpoints"]["custom-drafter"] |= {
        "path": "{drafters}/from-store",
        "source": {
            "kind": "rsync",
            "host": "127.0.0.1",
            "port": int(os.environ["KIMI_RIG_SANDBOX_PORT"]),
            "path": "/srv/store/custom",
            "identity_file": "/root/.ssh/store",
            "known_hosts": "/root/.ssh/store_hosts",
            "exclude": ["*.pt"],
        },
        "training": {"notes": None, **training},
    }
    OVERLAY.write_text(yaml.safe_dump(content))
    forget_catalogs()


def test_a_killed_deploy_is_followed_by_the_next(box: DeployBox, web: str) -> None:
    lay(web, convention="input", layer_ids=[2, 3, 4])
    command = [sys.executable, "-m", "pyinfra", *STAGE]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert first.stdout is not None
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(first.stdout or ()), daemon=True)
    reader.start()
    end = time.monotonic() + 120
    while "to fetch" not in "".join(said) and time.monotonic() < end:
        time.sleep(0.2)
    first.kill()
    first.wait()
    reader.join()
    # Bytes and time stand there before the first byte is shown.
    assert f"{(FILLER + 1.5e6) / 1e6:.1f} MB to fetch" in "".join(said) and "rate 2.0 MB/s, about" in "".join(said)
    unit = "kimi-job-checkpoint-aq-medai-k2-drafter"
    begun = box.ssh(f"systemctl show -P InvocationID {unit}").stdout
    spec = "/etc/kimi-rig/checkpoints/aq-medai-k2-drafter.json"
    second = box.ssh(f"rigctl checkpoints stage aq-medai-k2-drafter --spec {spec}", check=False)
    assert second.returncode == 1 and "a job is running already" in second.stderr
    assert "running: " in box.ssh("rigctl checkpoints status aq-medai-k2-drafter").stdout
    assert not box.ssh("ls -d /data/eagle3/from-web", check=False).stdout
    following = box.run("pyinfra", *STAGE)
    assert following.returncode == 0, following.stdout + following.stderr
    assert "MB/s" in following.stderr and "filler.bin" in following.stderr
    assert begun.strip() in box.ssh(f"journalctl -q -o json -u {unit} | tail -1").stdout, "another job was started"
    assert "from-web" in box.ssh("rigctl checkpoints status aq-medai-k2-drafter").stdout


def test_the_other_tree_came_over_ssh_without_what_is_excluded(box: DeployBox) -> None:
    assert box.ssh("ls /data/eagle3/from-store").stdout.split() == ["config.json", "model.safetensors"]
    assert box.ssh("cmp /srv/store/custom/model.safetensors /data/eagle3/from-store/model.safetensors").returncode == 0
    record = json.loads(box.ssh("rigctl checkpoints status custom-drafter --json").stdout)
    assert record["source"] == "rsync:127.0.0.1:/srv/store/custom" and record["state"] == "complete"


def test_layer_ids_stand_beside_the_drafter_where_the_engine_reads_them(box: DeployBox) -> None:
    overlay = f"/var/lib/kimi-rig/drafters/custom-drafter/{RELEASE}"
    config = json.loads(box.ssh(f"cat {overlay}/config.json").stdout)
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert "eagle_aux" not in box.ssh("cat /data/eagle3/from-store/config.json").stdout
    assert (
        box.ssh(f"readlink {overlay}/model.safetensors").stdout.strip() == "/data/eagle3/from-store/model.safetensors"
    )


def test_the_next_deploy_changes_nothing(box: DeployBox) -> None:
    again = box.run("pyinfra", *STAGE, "--json")
    assert again.returncode == 0, again.stderr
    changed = [row for row in json.loads(again.stdout)["results"]["operations"] if row["success"]]
    assert not changed, f"changed again: {changed}"


def test_a_drafter_that_does_not_fit_ends_the_deploy(box: DeployBox, web: str) -> None:
    lay(web, convention="output", layer_ids=[4, 5, 6])
    refused = box.run("pyinfra", *STAGE)
    assert refused.returncode != 0
    assert "trained on inputs [5, 6, 7], the target has 7 layers" in refused.stderr + refused.stdout


def test_a_repository_without_a_revision_is_refused_unless_told_otherwise(box: DeployBox, web: str) -> None:
    endpoint = web.removesuffix("/plain")
    for name in ("aq-medai-k2-drafter", "custom-drafter"):
        box.ssh(f"rigctl checkpoints forget {name}; rm -rf /data/eagle3/*")
    lay_hub(endpoint=endpoint)
    refused = box.run("pyinfra", *STAGE)
    assert refused.returncode != 0
    assert "has no pinned revision: `make pin CHECKPOINT=aq-medai-k2-drafter`" in refused.stderr + refused.stdout
    assert not box.ssh("ls -d /data/eagle3/from-hub", check=False).stdout
    lay_hub(endpoint=endpoint, allow_unpinned=True)
    told = box.run("pyinfra", *STAGE)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "has no manifest in inventory/manifests, the hub is asked" in told.stderr + told.stdout
    assert f"revision {COMMIT}" in box.ssh("rigctl checkpoints status aq-medai-k2-drafter").stdout
