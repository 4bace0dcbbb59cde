"""A deploy interrupted anywhere, by anything, is finished by the next one; verification passes each time."""

from __future__ import annotations

import pytest

from rigctl.contract import layout
from tests.drill.interruptions import Point, interrupt
from tests.sandbox.conftest import DeployBox

# What each point undoes first, so that the interrupted deploy has that stage's work to do.
LATE = f"rm -rf {layout.RECEIPT} {layout.UNITS}/kimi-*.service {layout.CONFIGURATIONS}/*"
BASE = (
    f"{LATE}; apt-get -qqy purge rsync >/dev/null; userdel kimi; userdel kimi-build; "
    f"rm -f {layout.RIGCTL_LINK} /etc/sysusers.d/kimi-rig.conf"
)
HOSTKIT = f"{LATE}; rm -rf {layout.HOSTKIT}"
ENGINES = f"{LATE}; rm -rf /opt/kimi-rig/env/*/*"  # uv's cache stays: a rebuild takes seconds, not minutes
CHECKPOINTS = f"{LATE}; rm -rf /shared/* /data/eagle3/* {layout.STATE}/checkpoints"

POINTS = [
    (Point("deploy killed", "Connected"), LATE),
    (Point("apt killed on the host", "Install packages"), BASE),
    (Point("connection killed", "Install packages", 1.0), BASE),
    (Point("deploy killed", "Create user"), BASE),
    (Point("connection killed", "Install rigctl", 1.0), HOSTKIT),
    (Point("job killed on the host", "Install rigctl"), HOSTKIT),
    (Point("deploy killed", "Build the environment", 4.0), ENGINES),
    (Point("box stopped", "Build the environment", 6.0), ENGINES),
    (Point("connection killed", "Stage kimi-k2.5-int4", 0.5), CHECKPOINTS),
    (Point("deploy killed", "Write units", 0.2), LATE),
]


@pytest.fixture(scope="module")
def box(bare_box: DeployBox) -> DeployBox:
    deploy = bare_box.deploy()
    assert deploy.returncode == 0, deploy.stdout + deploy.stderr
    return bare_box


@pytest.mark.parametrize(("point", "undo"), POINTS, ids=[str(point) for point, _ in POINTS])
def test_the_next_deploy_converges(box: DeployBox, point: Point, undo: str) -> None:
    box.ssh(undo)
    assert interrupt(box, point) != 0, "an interrupted deploy said it converged"
    deploy = box.deploy()
    assert deploy.returncode == 0, deploy.stdout + deploy.stderr
    assert deploy.stdout.strip().endswith(f"converged: {box.box.name}")
    verify = box.verify()
    assert verify.returncode == 0, verify.stdout
