"""Keep, install or refuse the driver; and the host stage against a host that only answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rig.catalog.entries import load_catalog
from rig.facts.host import Driver, HostFacts
from rig.host.nvidia_driver import Action, driver_step, minimum_driver
from tests.unit import host_archetypes as hosts

SOUND = hosts.TURIN_DIRECT


def action(facts: HostFacts, *, upgrade: bool = False, in_use: bool = False, minimum: str = "580.65.06") -> Action:
    return driver_step(facts, minimum, upgrade=upgrade, in_use=in_use).action


def test_a_working_driver_is_kept_also_when_an_upgrade_is_allowed() -> None:
    assert action(SOUND) is Action.KEEP
    assert action(SOUND, upgrade=True) is Action.KEEP


def test_a_bare_host_gets_one() -> None:
    assert action(hosts.bare(SOUND)) is Action.INSTALL
    assert action(replace(hosts.bare(SOUND), container="docker")) is Action.KEEP
    assert action(hosts.NO_GPU) is Action.KEEP


@pytest.mark.parametrize("driver", [Driver("570.86.15", True), Driver("590.48.01", False)])
def test_a_driver_that_will_not_do_is_changed_only_when_asked_and_idle(driver: Driver) -> None:
    facts = replace(SOUND, driver=driver)
    assert action(facts) is Action.REFUSE
    assert action(facts, upgrade=True, in_use=True) is Action.REFUSE
    assert action(facts, upgrade=True) is Action.INSTALL


def test_an_installed_driver_waits_for_the_boot() -> None:
    for driver in (Driver(on_disk="590.48.01"), Driver("580.95.05", True, on_disk="590.48.01")):
        step = driver_step(replace(SOUND, driver=driver), "570", upgrade=True, in_use=False)
        assert step.action is Action.KEEP
        assert step.reboot is not None
        assert "590.48.01 is installed" in step.reboot


def test_the_driver_that_the_next_boot_loads_is_compared() -> None:
    """Neither a driver that goes with the boot counts, nor the kind of its modules."""
    for driver in (Driver(on_disk="570.86.15"), Driver("590.48.01", True, on_disk="570.86.15")):
        facts = replace(SOUND, driver=driver)
        assert action(facts) is Action.REFUSE
        assert action(facts, upgrade=True) is Action.INSTALL
        assert "driver 570.86.15 is older than" in driver_step(facts, "580", upgrade=False, in_use=False).reason
    staged = driver_step(
        replace(SOUND, driver=Driver("570.86.15", False, on_disk="590.48.01")), "580", upgrade=False, in_use=True
    )
    assert staged.action is Action.KEEP and staged.reboot is not None


def test_a_host_whose_cards_are_all_of_guests_gets_no_driver() -> None:
    taken = tuple(replace(card, bound_to="vfio-pci") for card in hosts.bare(SOUND).gpus)
    step = driver_step(replace(hosts.bare(SOUND), gpus=taken), "580", upgrade=True, in_use=False)
    assert (step.action, step.reason) == (Action.KEEP, "all NVIDIA cards belong to guests")


def test_proprietary_modules_are_fine_on_hopper() -> None:
    assert action(replace(hosts.H200_1, driver=Driver("590.48.01", False))) is Action.KEEP


def test_the_highest_minimum_counts() -> None:
    releases = load_catalog().releases
    assert minimum_driver(releases.values()) == "580"
    assert minimum_driver([]) == "0"
