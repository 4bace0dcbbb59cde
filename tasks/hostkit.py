"""Hostkit: the program that lives on the host (rigctl)."""

from pyinfra.api import deploy

from rig.operations import hostkit as operations


@deploy("Hostkit")
def hostkit() -> None:
    operations.installed(name="Install rigctl")


if __name__ == "builtins":
    hostkit()
