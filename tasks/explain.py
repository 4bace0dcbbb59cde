"""Explain: for `make explain`. Reads the host and writes its page where the wrapper asked for it; no operations."""

import json
import os
from pathlib import Path

from pyinfra import host

from rig.cli.explain import PAGES, live_page
from rig.plan.current import current_plan

if __name__ == "builtins":
    with Path(os.environ[PAGES]).open("a", encoding="utf-8") as pages:
        pages.write(json.dumps(live_page(host.name, current_plan())) + "\n")
