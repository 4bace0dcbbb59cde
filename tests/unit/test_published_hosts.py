"""The policy decides as the owners of published hosts did, where their figures or their words stand behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rig.host.explanation import explain_text
from rig.host.live_settings import Standing, reboot_needed, standing
from rig.host.nvidia_driver import Action, driver_step
from rig.host.preflight import Needs, preflight
from rig.host.system_files import host_files
from rig.host.topology import decide
from tests.unit.published_hosts import HOSTS, KEPT, Published

SOURCES = [one.source for one in HOSTS]


@pytest.mark.parametrize("host", HOSTS, ids=SOURCES)
def test_a_published_host_is_decided_as_its_owner_did(host: Published) -> None:
    decision = decide(host.facts, host.overrides, host.workload)
    for key, published in host.settings.items():
        setting = decision.find(key)
        if published == KEPT:
            assert setting is not None and standing(setting, host.facts) is Standing.KEPT, key
        else:
            assert (setting.value if setting is not None and setting.applied else None) == published, key
    assert host.cards is None or decision.host.gpus == host.cards


@pytest.mark.parametrize("host", HOSTS, ids=SOURCES)
def test_nothing_stands_against_what_an_owner_runs(host: Published) -> None:
    """It is explained, its files can be written, no check refuses it, and its driver stays."""
    decision = decide(host.facts, host.overrides, host.workload)
    assert explain_text(host.source, host.facts, decision)
    host_files(decision.host, host.facts)
    errors = [str(one) for one in preflight(host.facts, decision, Needs()) if one.severity == "error"]
    assert errors == []
    waited = [one.key for one in reboot_needed(decision.settings, replace(host.facts, accepted=("one",)))]
    assert not waited or "iommu" in waited[0]
    assert driver_step(host.facts, "580", upgrade=False, in_use=False).action is Action.KEEP
