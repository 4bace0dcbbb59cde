"""Engine dialects: one catalogue entry in, the engine's command line out. Pure.

Flag names as the engines' own parsers know them (vLLM 0.16 to 0.33, SGLang 0.5.9 to 0.5.23).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rig.catalog.entries import Configuration, FlagValue, Release, Speculation, negative_form
from rig.catalog.speculation_flags import DRAFTER, FLAGS, LAYERS, STEPS, TOPK, VERIFIED, connector, filled
from rigctl.contract.speculation import EXTRACTS


@dataclass(frozen=True)
class Locations:
    """Absolute paths on the host that a command line names."""

    python: str
    target: str
    drafter: str | None
    staging: str | None = None
    """Where an extraction of hidden states writes."""


def command_line(
    configuration: Configuration, release: Release, at: Locations, drain_seconds: int | None = None
) -> list[str]:
    """The engine's argv, without secrets (API keys travel as credentials).

    drain_seconds: how long running requests may take after a stop, for a release that takes it as a flag.
    """
    dialect = {"vllm": _vllm, "sglang": _sglang}[release.engine]
    argv = [at.python, *release.launch]
    drain = {"shutdown-timeout": drain_seconds} if release.drain == "flag" and drain_seconds is not None else {}
    drafts = _speculation(release.engine, configuration.speculation, at)
    for name, value in {**dialect(configuration, at), **drafts, **drain, **configuration.flags}.items():
        argv += negative_form(configuration.release, name) if value is False else [f"--{name}", *_words(value)]
    return argv


def served_model_name(configuration: Configuration, at: Locations) -> str:
    """The name clients use."""
    return configuration.served_model_name or at.target


def _vllm(configuration: Configuration, at: Locations) -> dict[str, FlagValue]:
    flags: dict[str, FlagValue | None] = {
        "model": at.target,
        "served-model-name": served_model_name(configuration, at),
        "host": configuration.listen.host,
        "port": configuration.listen.port,
        "tensor-parallel-size": configuration.tensor_parallel,
        "max-model-len": configuration.context_length,
        "max-num-seqs": configuration.max_running_requests,
        "gpu-memory-utilization": configuration.fraction,
        "tool-call-parser": configuration.tool_call_parser,
        "enable-auto-tool-choice": configuration.tool_call_parser is not None,
        "reasoning-parser": configuration.reasoning_parser,
        "trust-remote-code": configuration.trust_remote_code,
    }
    return _present(flags)


def _sglang(configuration: Configuration, at: Locations) -> dict[str, FlagValue]:
    flags: dict[str, FlagValue | None] = {
        "model-path": at.target,
        "served-model-name": served_model_name(configuration, at),
        "host": configuration.listen.host,
        "port": configuration.listen.port,
        "tp-size": configuration.tensor_parallel,
        "context-length": configuration.context_length,
        "max-running-requests": configuration.max_running_requests,
        "mem-fraction-static": configuration.fraction,
        "tool-call-parser": configuration.tool_call_parser,
        "reasoning-parser": configuration.reasoning_parser,
        "trust-remote-code": configuration.trust_remote_code,
    }
    return _present(flags)


def _speculation(engine: str, speculation: Speculation | None, at: Locations) -> dict[str, FlagValue]:
    if speculation is None:
        return {}
    values: dict[str, Any] = {
        DRAFTER: at.drafter,
        STEPS: speculation.steps,
        TOPK: speculation.topk,
        VERIFIED: speculation.verified,
    }
    values[LAYERS] = speculation.layers
    flags: dict[str, FlagValue] = filled(FLAGS[engine, speculation.method].flags, values)
    if speculation.method == EXTRACTS:
        return {**flags, "kv-transfer-config": connector(str(at.staging), speculation.options)}
    if speculation.options:  # of vLLM alone (rig/catalog/entries.py)
        flags = {name: {**value, **speculation.options} for name, value in flags.items() if isinstance(value, dict)}
    return flags


def _present(flags: Mapping[str, FlagValue | None]) -> dict[str, FlagValue]:
    """Without what the entry leaves to the engine."""
    return {name: value for name, value in flags.items() if value is not None and value is not False}


def _words(value: Any) -> list[str]:
    if value is True:
        return []
    if isinstance(value, list):
        return [str(item) for item in value]
    if isinstance(value, Mapping):
        return [json.dumps(value, separators=(", ", ": "), ensure_ascii=False)]
    return [str(value)]
