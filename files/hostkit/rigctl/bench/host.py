"""What a result needs to know of its host, and drafters with shifted layer ids."""

import os
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rigctl.bench.counters import gpu_state
from rigctl.checkpoints import overlay
from rigctl.contract import layout
from rigctl.contract.canary import outcomes
from rigctl.contract.order import faults
from rigctl.contract.sweep import HostFacts, ModelFacts
from rigctl.errors import RigctlError
from rigctl.nvidia_smi import nvidia_smi
from rigctl.whole_files import read_object

RECEIPT = Path(layout.RECEIPT)


def host_facts(models: Sequence[str]) -> HostFacts:
    """Hardware, driver, kernel, the host's receipt, and for each model directory its layers and layer ids."""
    return HostFacts(
        hardware=_hardware(),
        driver=next((row[0] for row in nvidia_smi("--query-gpu=driver_version")), None),
        kernel=platform.release(),
        receipt={**(read_object(RECEIPT) or {}), "canary": outcomes()},
        models={path: _model(Path(path)) for path in models},
    )


def _hardware() -> str:
    cards = Counter(gpu.name.partition(" ")[2] for gpu in gpu_state())
    if cards:
        return ", ".join(f"{count}x {name}" for name, count in cards.items())
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"no GPU, {os.cpu_count()} cores of {model}"


def _model(path: Path) -> ModelFacts:
    """Layers, and the layer ids a drafter's config.json names at its top or in eagle_config."""
    config = read_object(path / "config.json") or {}
    text, eagle = (_mapping(config.get(key)) for key in ("text_config", "eagle_config"))
    key = "eagle_aux_hidden_state_layer_ids"
    found = {"layers": (text or config).get("num_hidden_layers"), "layer_ids": config.get(key) or eagle.get(key)}
    try:
        return ModelFacts.model_validate(found)
    except ValidationError as error:
        raise RigctlError(f"{path}/config.json: {'; '.join(faults(error, ModelFacts, found))}") from None


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def shifted_drafter(source: Path, destination: Path, target: Path, shift: int) -> list[int]:
    """Make `destination` an overlay of the drafter `source` with its layer ids shifted; returns the ids.

    Where the drafter names none, both engines' default (2, N // 2, N - 3) is shifted. Raises RigctlError when source or
    target cannot be read, or an id would leave the target's layers.
    """
    config = read_object(source / "config.json")
    layers = _model(target).layers
    if not config or not layers:
        raise RigctlError(f"{source}/config.json or {target}/config.json cannot be read, or names no layers")
    ids = [layer + shift for layer in _model(source).layer_ids or [2, layers // 2, layers - 3]]
    if min(ids) < 0 or max(ids) > layers:
        raise RigctlError(f"shifted by {shift} the layer ids are {ids}, the target has {layers} layers")
    keys: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": ids}
    if isinstance(config.get("eagle_config"), dict):
        keys["eagle_config"] = dict(keys)
    overlay.write(source, destination, keys)
    return ids
