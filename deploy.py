"""kimi-rig: what a host gets, in this order."""

from rig.target import current_plan
from tasks.base import base
from tasks.checkpoints import checkpoints
from tasks.engines import engines
from tasks.hostkit import hostkit
from tasks.receipt import receipt
from tasks.units import units

plan = current_plan()

base(plan=plan)  # deploy lock, packages, service user, directories, secrets
hostkit()  # rigctl, in an environment of its own
engines(plan=plan)  # one locked environment an engine release
checkpoints(plan=plan)  # model and drafters
units(plan=plan)  # one systemd service a serving configuration
receipt(plan=plan)  # what is installed, and from what
