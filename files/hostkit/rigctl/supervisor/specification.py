"""The configurations of this host: their run specifications, and where each keeps what happened."""

import os
from pathlib import Path

from rigctl.contract import layout
from rigctl.contract.order import ContractError, nearest
from rigctl.contract.run_specification import RunSpecification
from rigctl.errors import RigctlError
from rigctl.guarded import Place


class Specification(RunSpecification):
    """One configuration as deployed, and its directories."""

    @property
    def runtime(self) -> Place:
        """Directory of this boot's facts: started.json, watch.json, metrics.prom, cause.json, failures.json."""
        return runtime_of(self.name)

    @property
    def state(self) -> Place:
        """Directory of facts that outlive a boot: accepted.json, ended.json."""
        return _place("STATE_DIRECTORY", layout.SERVING, self.name)

    @property
    def logs(self) -> Place:
        """Directory of one log file a run."""
        return _place("LOGS_DIRECTORY", layout.LOGS, self.name)

    @property
    def cache(self) -> Place:
        """Directory of what its engines compile, a directory a release, and of their profiles."""
        return _place("CACHE_DIRECTORY", layout.CACHE, self.name)


def runtime_of(name: str) -> Place:
    """`Specification.runtime` of one whose specification cannot be used."""
    return _place("RUNTIME_DIRECTORY", layout.RUNTIME, name)


def _place(variable: str, parent: str, name: str) -> Place:
    """A directory of a unit's: what systemd says inside the unit (systemd.exec(5)), else the one it would make."""
    return Place(os.environ.get(variable) or f"{parent}/{name}")


def named(name: str) -> Specification:
    """The specification of configuration `name` (with or without kimi- and .service). Raises RigctlError."""
    known = {path.stem: path for path in _files()}
    wanted = name.removesuffix(".service")
    if wanted not in known:  # a configuration may itself begin so
        wanted = wanted.removeprefix("kimi-")
    if wanted not in known:
        raise RigctlError(
            f"there is no configuration {wanted} on this host{nearest(wanted, known)}; `rigctl status` lists them"
        )
    return Specification.read(known[wanted])


def installed() -> list[Specification]:
    """Every configuration whose specification can be used, by name."""
    return [found for found in configurations().values() if isinstance(found, Specification)]


def configurations() -> dict[str, Specification | ContractError]:
    """Every configuration this host has, by name: its specification, or why that cannot be used."""
    found: dict[str, Specification | ContractError] = {}
    for path in _files():
        try:
            found[path.stem] = Specification.read(path)
        except ContractError as error:
            found[path.stem] = error
    return found


def _files() -> list[Path]:
    return sorted(Path(layout.CONFIGURATIONS).glob("*.json"))
