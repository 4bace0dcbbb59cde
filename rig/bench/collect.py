"""From what a host measured to ledger entries. Pure."""

from pydantic import ValidationError

from rig.bench import ledger
from rig.bench.sweeps import HostSweep, prompts_digest
from rig.bench.variants import Derived
from rig.catalog.entries import Checkpoint, Configuration
from rigctl.contract.order import faults
from rigctl.contract.sweep import CellResult, HostFacts, ModelFacts


def to_result(cell: CellResult, sweep: HostSweep, derived: Derived, host: str, facts: HostFacts) -> ledger.Result:
    """One cell with what is known of host and configuration. Raises LedgerError for a cell that the sweep has not."""
    if (cell.configuration, cell.workload) not in sweep.order.pairs:
        raise ledger.LedgerError(f"{cell.configuration}, {cell.workload}: not a result of sweep {sweep.order.id}")
    workload = next(one for one in sweep.order.workloads if one.id == cell.workload)
    stamp = "".join(c for c in cell.at if c.isalnum()).lower()
    same = ("at", "status", "cause", "order", "warmup_rounds", "warmup_stable", "rounds", "profile", "load_times")
    try:
        return ledger.Result(
            id=f"{cell.configuration}-{cell.workload}-{stamp}",
            sweep=sweep.name,
            host=host,
            hardware=facts.hardware,
            configuration=served_as(derived, cell.configuration, cell.digest, facts),
            workload=ledger.Workload(
                **workload.model_dump(exclude={"id"}),
                prompts_sha256=prompts_digest(workload.prompts),
                cache="fresh",
                generator=cell.generator or "aiperf",
            ),
            receipt=facts.model_dump(include={"receipt", "driver", "kernel"}),
            **{key: getattr(cell, key) for key in same},
        )
    except ValidationError as error:
        found = "; ".join(faults(error, ledger.Result, cell.model_dump()))
        raise ledger.LedgerError(f"{cell.configuration}, {cell.workload}: not a result: {found}") from None


def served_as(derived: Derived, name: str, digest: str, facts: HostFacts) -> ledger.ServedAs:
    """The configuration as the ledger has it."""
    plan = derived.plan
    configuration = plan.serving[name]
    release = plan.environments[configuration.release].release
    speculation = configuration.speculation
    drafter = _by_flags(configuration)
    if speculation is not None:
        drafter = ledger.Drafter(
            name=speculation.drafter or speculation.method,
            method=speculation.method,
            steps=speculation.steps,
            draft_tokens=speculation.draft_tokens if release.engine == "sglang" else None,
        )
        if speculation.drafter:
            path = plan.checkpoint_paths[speculation.drafter]
            known = {
                "targets": trained_for(plan.checkpoints[speculation.drafter]),
                "layer_ids": facts.models.get(path, ModelFacts()).layer_ids,
            }
            drafter = drafter.model_copy(update=known)
    layers = facts.models.get(plan.checkpoint_paths[configuration.target], ModelFacts()).layers
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
    """Speculation that an entry gives as flags of its own, as those of n-gram had to before it was a method."""
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
    """The models a drafter was trained for; where that is not known, those that it may serve."""
    return [drafter.training.target] if drafter.training.target else list(drafter.targets)
