"""From what a host measured to ledger entries. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from rig.bench import ledger
from rig.bench.sweeps import HostSweep, prompts_digest
from rig.bench.variants import Derived
from rig.catalog.entries import Checkpoint, Configuration
from rig.plan.host_plan import HostPlan


def to_result(
    cell: Mapping[str, Any], sweep: HostSweep, derived: Derived, host: str, facts: Mapping[str, Any]
) -> ledger.Result:
    """One cell as `rigctl bench` wrote it, with what is known of host and configuration.

    facts: the output of `rigctl bench host`. Raises LedgerError when the cell is not what this version knows.
    """
    workload = next(w for w in sweep.document["workloads"] if w["id"] == cell["workload"])
    stamp = "".join(c for c in cell["at"] if c.isalnum()).lower()
    try:
        return ledger.Result.model_validate(
            {
                "id": f"{cell['configuration']}-{cell['workload']}-{stamp}",
                "at": cell["at"],
                "sweep": sweep.name,
                "host": host,
                "hardware": facts["hardware"],
                "configuration": served_as(derived, cell["configuration"], cell["digest"], facts),
                "workload": _workload(workload, cell),
                "receipt": {key: facts.get(key) for key in ("receipt", "driver", "kernel")},
                **{
                    key: cell[key]
                    for key in ("status", "cause", "order", "warmup_rounds", "warmup_stable")
                    if key in cell
                },
                "rounds": [{key: value for key, value in r.items() if key != "generator"} for r in cell["rounds"]],
                "profile": cell.get("profile", {}),
            }
        )
    except (ValidationError, KeyError) as error:
        raise ledger.LedgerError(
            f"{cell.get('configuration')}, {cell.get('workload')}: not a result: {error}"
        ) from None


def _workload(workload: Mapping[str, Any], cell: Mapping[str, Any]) -> dict[str, Any]:
    known = {key: value for key, value in workload.items() if key != "id"}
    generators = {measured["generator"] for measured in cell["rounds"]}
    return {
        **known,
        "prompts_sha256": prompts_digest(workload["prompts"]),
        "cache": "fresh",
        "generator": ", ".join(sorted(generators)) or "aiperf",
    }


def served_as(derived: Derived, name: str, digest: str, facts: Mapping[str, Any]) -> ledger.ServedAs:
    """The configuration as the ledger has it."""
    plan: HostPlan = derived.plan
    configuration = plan.serving[name]
    release = plan.environments[configuration.release].release
    models = facts.get("models", {})
    speculation = configuration.speculation
    drafter = _by_flags(configuration)
    if speculation is not None:
        entry = plan.checkpoints[speculation.drafter]
        ids = models.get(plan.checkpoint_paths[speculation.drafter], {}).get("layer_ids")
        drafter = ledger.Drafter(
            name=speculation.drafter,
            steps=speculation.steps,
            draft_tokens=speculation.draft_tokens if release.engine == "sglang" else None,
            targets=trained_for(entry),
            layer_ids=ids,
        )
    layers = models.get(plan.checkpoint_paths[configuration.target], {}).get("layers")
    return ledger.ServedAs(
        name=name,
        engine=release.engine,
        version=release.version,
        target=configuration.target,
        drafter=drafter,
        max_running_requests=configuration.max_running_requests,
        context_length=configuration.context_length,
        details={"digest": digest, "target_layers": layers, "entry": configuration.model_dump(mode="json")},
    )


def _by_flags(configuration: Configuration) -> ledger.Drafter | None:
    """Speculation without a drafter of its own (n-gram), which is a matter of flags."""
    flags = configuration.flags
    vllm, sglang = flags.get("speculative-config"), flags.get("speculative-algorithm")
    if isinstance(vllm, dict):
        return ledger.Drafter(name=str(vllm.get("method")), steps=int(vllm.get("num_speculative_tokens", 1)))
    if sglang is not None:
        drafted = flags.get("speculative-num-draft-tokens", 2)
        tokens = drafted if isinstance(drafted, int) else 2
        return ledger.Drafter(name=str(sglang).lower(), steps=max(1, tokens - 1), draft_tokens=tokens)
    return None


def trained_for(drafter: Checkpoint) -> list[str]:
    """The models a drafter was trained for. A repository that names Kimi-K2 without .5 is told by its name."""
    source = drafter.source
    if source.kind == "hub" and re.search(r"Kimi-K2(?![.]?5)", source.repository, re.IGNORECASE):
        return ["kimi-k2"]
    return list(drafter.targets)
