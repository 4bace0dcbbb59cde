"""What the tests of the serving units share: a specification, a whole checkpoint, a supervisor with a stand-in."""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rig.catalog.entries import ROOT
from rigctl.checkpoints import record
from rigctl.checkpoints.verify import manifest_of
from rigctl.contract.limits import Limits
from rigctl.contract.run_specification import RunSpecification
from rigctl.contract.served_checkpoints import Training
from rigctl.supervisor.specification import Specification

EAGLE3 = {"method": "eagle3", "drafter": "d", "steps": 3, "draft_tokens": 4, "break_even_length": None}
STANDIN = ROOT / "tests" / "standin.py"


def limits(**more: Any) -> dict[str, Any]:
    """The defaults of every threshold but those given."""
    return {**Limits().model_dump(), "minimum_disk_mib": 1, "minimum_shm_mib": 0, **more}


def fields(**more: Any) -> dict[str, Any]:
    """The content of a run specification. port: of its one endpoint."""
    endpoint = {"host": "127.0.0.1", "port": more.pop("port", None) or free_port()}
    content: dict[str, Any] = {
        "format": RunSpecification.FORMAT,
        "name": "drill",
        "description": "",
        "engine": "vllm",
        "release": "stand-in",
        "family": None,
        "endpoints": [endpoint],
        "model": "stand-in",
        "api_key": False,
        "gpus": [],
        "target_path": "/nonexistent",
        "drafter_path": None,
        "environment_path": "/nonexistent",
        "series": None,
        "host_settings": {
            "kernel_arguments": [],
            "module_options": {},
            "sysctls": {},
            "governor": None,
            "disk_scheduler": {},
            "power_limit_w": None,
        },
        "answer": {"thinks": "always", "tokens": 512},
        "quiet": {},
        "sampling": {},
        "tool_call_parser": "kimi_k2",
        "reasoning_parser": "kimi_k2",
        "speculation": EAGLE3,
        "checkpoints": {
            "target": "target",
            "drafter": "drafter",
            "version": "0.33.0",
            "context": 1024,
            "trust_remote_code": False,
            "training": Training(convention="engine-default").model_dump(),
        },
        "harmless_log": ["cannot import name 'SparseMatrix'"],
        "drain": "flag",
        "rate_counts_bonus": False,
        "limits": limits(),
        "unit_digest": "",
        "digest": "d" * 64,
        "same_as": [],
    }
    return {**content, **more}


def specification(**more: Any) -> Specification:
    return Specification.parse(fields(**more), "test")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def checkpoint(directory: Path, **config: Any) -> Path:
    """A directory that looks like a target: a config and one whole safetensors file."""
    shape = {"hidden_size": 8, "vocab_size": 16, "num_hidden_layers": 61, "max_position_embeddings": 4096}
    return _directory(directory, {**shape, **config}, {"a": [4]})


def drafter(directory: Path, **config: Any) -> Path:
    """A drafter that fits `checkpoint`, by its headers."""
    shape = {"hidden_size": 8, "vocab_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 4096}
    content = {"architectures": ["LlamaForCausalLMEagle3"], **shape, **config}
    return _directory(directory, content, {"fc.weight": [8, 24], "lm_head.weight": [16, 8]})


def _directory(directory: Path, config: dict[str, Any], shapes: dict[str, list[int]]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        tensors[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(tensors).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(end))
    return directory


def proved(state: Path, **directories: Path) -> Path:
    """Record checkpoints, name -> directory, as proved; the state directory."""
    for name, place in directories.items():
        manifest, seen = manifest_of(place, f"adopted:{place}")
        record.State(state).save(record.Record(name, str(place), "adopted", manifest, seen, 0.0, 0.0))
    return state


class Run:
    """A supervisor with a stand-in engine, and a socket in systemd's place."""

    def __init__(self, directory: Path, plan: dict[str, Any] | None = None, *argv: str, **more: Any) -> None:
        self.directory = directory
        for name in ("run", "state", "logs"):
            (directory / name).mkdir(exist_ok=True)
        self.faults = directory / "faults.json"
        if not (directory / "target").exists():
            checkpoint(directory / "target")
            proved(directory / "checkpoints", target=directory / "target")
        content = fields(**{"target_path": str(directory / "target"), **more})
        self.port = content["endpoints"][0]["port"]
        path = directory / "specification.json"
        path.write_text(json.dumps(content))
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        (directory / "notify").unlink(missing_ok=True)
        self.channel.bind(str(directory / "notify"))
        self.channel.settimeout(0.2)
        self.said: list[str] = []
        self.begun = time.monotonic()
        command = [
            sys.executable,
            "-c",
            "from rigctl.cli import main; import sys; sys.exit(main())",
            "serve",
            str(path),
        ]
        engine = [sys.executable, str(STANDIN), "--port", str(self.port), "--faults", str(self.faults)]
        engine += ["--plan", json.dumps(plan or {}), "--shutdown-timeout", "5", *argv]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "files" / "hostkit"),
            "NOTIFY_SOCKET": str(directory / "notify"),
            "RUNTIME_DIRECTORY": str(directory / "run"),
            "STATE_DIRECTORY": str(directory / "state"),
            "LOGS_DIRECTORY": str(directory / "logs"),
            "HOME": str(directory / "home"),
            "RIGCTL_CHECKPOINTS": str(directory / "checkpoints"),
        }
        if (directory / "credentials").exists():
            environment["CREDENTIALS_DIRECTORY"] = str(directory / "credentials")
        with (directory / "journal").open("ab") as journal:
            self.process = subprocess.Popen(
                [*command, "--", *engine], env=environment, stdout=journal, stderr=journal, start_new_session=True
            )

    def until(self, text: str, seconds: float = 20) -> str:
        """The first message to systemd with `text` in it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                self.said.append(self.channel.recv(65536).decode())
            except TimeoutError:
                if self.process.poll() is not None:
                    break
                continue
            if text in self.said[-1]:
                return self.said[-1]
        raise AssertionError(f"{text!r} was not said, but:\n" + "\n".join(self.said) + self.journal)

    def end(self, seconds: float = 20) -> int:
        """The supervisor's exit status once it has ended."""
        return self.process.wait(seconds)

    def stop(self) -> int:
        """What systemd does on `systemctl stop`."""
        self.process.terminate()
        return self.end()

    def json(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "run" / name).read_text())
        return found

    @property
    def journal(self) -> str:
        return (self.directory / "journal").read_text()
