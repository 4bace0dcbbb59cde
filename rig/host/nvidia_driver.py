"""What is to be done about the NVIDIA driver: keep, install, or refuse. Pure.

A driver that works and is new enough is kept, whatever brought it there; none is changed unasked, and never under a
running engine.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from rig.catalog.entries import Release
from rig.facts.host import HostFacts
from rigctl.contract.comparison import version_tuple


class Action(StrEnum):
    """keep: nothing is done. install: packages are installed and held. refuse: the deploy ends with the reason."""

    KEEP = "keep"
    INSTALL = "install"
    REFUSE = "refuse"


@dataclass(frozen=True)
class DriverStep:
    """The decision and its reason; reboot: why one is needed before the driver is what it should be."""

    action: Action
    reason: str
    reboot: str | None = None


def minimum_driver(releases: Iterable[Release]) -> str:
    """The highest of the drivers that CUDA releases need; "0" where none says."""
    versions = [one.minimum_driver for one in releases if one.accelerator == "cuda" and one.minimum_driver]
    return max(versions, key=version_tuple, default="0")


def driver_step(facts: HostFacts, minimum: str, *, upgrade: bool, in_use: bool) -> DriverStep:
    """Decide from the facts. upgrade: the operator asked for it (host data driver_upgrade).

    in_use: an engine of ours runs, or some process holds memory of a card.
    """
    driver = facts.driver
    contained = facts.container not in (None, "none")
    if contained or all(gpu.taken for gpu in facts.gpus):
        cards = "all NVIDIA cards belong to guests" if facts.gpus else "there is no NVIDIA card"
        return DriverStep(Action.KEEP, "a container takes its host's driver" if contained else cards)
    if driver.version is None and driver.on_disk is None:
        return DriverStep(Action.INSTALL, "no driver is installed")
    loaded = f"driver {driver.version}" if driver.version else "no driver"
    wrong = _wrong(facts, minimum)
    if wrong is None:
        differs = f"{loaded} is loaded, {driver.on_disk or 'another version'} is installed"
        waits = driver.version is None or driver.mismatch
        return DriverStep(Action.KEEP, differs if waits else f"{loaded} works and is kept", differs if waits else None)
    if not upgrade or in_use:
        what = (
            "the cards are in use: stop what uses them first"
            if upgrade
            else "it is not changed unasked: set driver_upgrade for this host"
        )
        return DriverStep(Action.REFUSE, f"{wrong}; {what}")
    return DriverStep(Action.INSTALL, wrong, reboot=f"{loaded} stays loaded until then" if driver.version else None)


def _wrong(facts: HostFacts, minimum: str) -> str | None:
    """Of the driver that the next boot loads."""
    driver = facts.driver
    version = driver.on_disk or driver.version
    if version_tuple(version) < version_tuple(minimum):
        return f"driver {version} is older than {minimum}, which an engine release needs"
    if driver.mismatch:
        return None  # open_module is of the one that is loaded
    if driver.open_module is False and any((gpu.compute_capability or (0, 0)) >= (10, 0) for gpu in facts.gpus):
        return f"driver {version} has proprietary modules, Blackwell needs the open ones"
    return None
