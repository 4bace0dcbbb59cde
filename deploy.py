"""kimi-rig: what a host gets, in this order."""

from rig.plan.current import current_plan
from tasks.base import base
from tasks.checkpoints import checkpoints
from tasks.edge import edge
from tasks.engines import engines
from tasks.host import host
from tasks.hostkit import hostkit
from tasks.neighbours import neighbours
from tasks.receipt import receipt
from tasks.sgl_kernel import sgl_kernel
from tasks.training import training
from tasks.units import units

plan = current_plan()

neighbours(plan=plan)  # reported, never touched: servers on our ports and GPUs that are not ours
base(plan=plan)  # deploy lock, packages, service user, directories, secrets
host(plan=plan)  # preflight, driver, kernel arguments, module options, sysctls, each with its reason
hostkit(plan=plan)  # rigctl, in an environment of its own
engines(plan=plan)  # one locked environment an engine release
checkpoints(plan=plan)  # model and drafters
sgl_kernel(plan=plan)  # kernel libraries for this host's GPUs, proved, last into their environments
training(plan=plan)  # what a drafter of one's own is made from, where the host's data names a training
units(plan=plan)  # one systemd service a serving configuration
edge(plan=plan)  # TLS and API keys on one port, where others reach the host's engines
receipt(plan=plan)  # what is installed, and from what
