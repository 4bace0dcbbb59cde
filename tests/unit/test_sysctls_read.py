"""Every sysctl of the policy is read on hosts: one that is not would stand as "not known" for ever."""

import re

from rig.catalog.entries import ROOT
from rig.facts.remote_script import SYSCTLS


def test_every_sysctl_of_the_policy_is_read() -> None:
    rules = (ROOT / "rig" / "host" / "rules.py").read_text()
    named = set(re.findall(r'"((?:vm|kernel|net|fs)\.[a-z0-9_.]+)"', rules))
    assert named, "the rules name no sysctl: this test looks for the wrong form"
    assert named <= set(SYSCTLS), f"add to SYSCTLS in rig/facts/remote_script.py: {sorted(named - set(SYSCTLS))}"
