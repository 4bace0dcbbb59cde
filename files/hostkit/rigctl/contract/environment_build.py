"""The order `environment build`: which virtual environment is made, and from what."""

from rigctl.contract.fields import Place, PythonVersion, Remote, Text
from rigctl.contract.order import Order, Part


class Index(Part):
    """A package index that serves what the default one lacks."""

    url: Remote
    packages: list[Text]


class Environment(Part):
    """A virtual environment on a host and what it is made from.

    patches: directory of the patches that are applied to it.
    """

    path: Place
    python: PythonVersion
    lock: Place
    patches: Place | None = None


class EnvironmentBuild(Environment, Order):
    """cache: uv's, on the same file system. wheels: directory that has every wheel of the lock; no index is asked."""

    cache: Place
    index: Index | None = None
    wheels: Place | None = None
