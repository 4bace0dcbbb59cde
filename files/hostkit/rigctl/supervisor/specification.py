"""The configurations of this host: their run specifications, and where each keeps what happened."""

import os
from pathlib import Path
from typing import Any

from rigctl.contract import layout
from rigctl.contract.order import ContractError, nearest
from rigctl.contract.run_specification import RunSpecification
from rigctl.errors import RigctlError
from rigctl.whole_files import read_object


class Specification(RunSpecification):
    """One configuration as deployed, and its directories."""

    @property
    def runtime(self) -> Path:
        """Directory of this boot's facts: started.json, watch.json, metrics.prom, cause.json, failures.json."""
        return self._directory("RUNTIME_DIRECTORY", layout.RUNTIME)

    @property
    def state(self) -> Path:
        """Directory of facts that outlive a boot: accepted.json, ended.json."""
        return self._directory("STATE_DIRECTORY", layout.SERVING)

    @property
    def logs(self) -> Path:
        """Directory of one log file a run."""
        return self._directory("LOGS_DIRECTORY", layout.LOGS)

    def _directory(self, variable: str, parent: str) -> Path:
        given = os.environ.get(variable)  # systemd.exec(5): set inside the unit
        return Path(given) if given else Path(parent, self.name)


def named(name: str) -> Specification:
    """The specification of configuration `name` (with or without kimi- and .service). Raises RigctlError."""
    wanted = name.removeprefix("kimi-").removesuffix(".service")
    known = {path.stem: path for path in _files()}
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


def started(specification: Specification) -> dict[str, Any] | None:
    """What the running service wrote down when it was started and accepted; None while nothing runs."""
    return read_object(specification.runtime / "started.json")
