"""Trainings: an entry of training.yaml and the host's plan in, the order and the files that it reads out. Pure but for
reads of prompts and locks."""

from hashlib import sha256
from pathlib import Path
from typing import Any

from rig.artifacts.units import SYSTEM_PATH, engine_environment, jit_caches
from rig.catalog.drafter_training import DrafterTraining, PromptSource
from rig.catalog.entries import ROOT, Speculation
from rig.catalog.yaml_source import CatalogError
from rig.plan.command_lines import command_line, served_model_name
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout
from rigctl.contract.run_specification import Endpoint
from rigctl.contract.training_job import TrainingJob

STARTER = f"{layout.HOSTKIT}/current/rigctl/tiny_models/cpu/cpu_starter.py"
"""For a trainer without an accelerator: on hosts with a generated checkpoint alone, which are no GPU hosts."""
SHAPE = {"hidden": "hidden_size", "layers": "num_hidden_layers", "vocabulary": "vocab_size"}
"""Field of the order -> key of the target's `shape`."""


def training_job(plan: HostPlan, name: str) -> TrainingJob:
    """The order. Raises CatalogError for prompts that cannot be read, ContractError for values that do not agree."""
    entry = plan.trainings[name]
    target, trainer = plan.checkpoints[entry.target], plan.trainers[entry.trainer]
    if missing := [key for key in SHAPE.values() if not isinstance(target.shape.get(key), int)]:
        raise CatalogError(f"checkpoints.{entry.target}.shape: {', '.join(missing)} is needed to train for it")
    layers = plan.serving[entry.states.configuration].speculation
    content: dict[str, Any] = {
        "format": TrainingJob.FORMAT,
        "name": name,
        "user": plan.data.service_user,
        "root": plan.data.training,
        "target": entry.target,
        "target_path": plan.checkpoint_paths[entry.target],
        "target_revision": getattr(target.source, "revision", None),
        **{field: target.shape[key] for field, key in SHAPE.items()},
        "start": _known(plan, entry.start) if entry.start else None,
        "prompts": [
            {
                "path": prompt_path(name, number, source),
                "sha256": sha256(_prompts(source)).hexdigest(),
                **source.model_dump(include={"domain", "licence", "provenance"}),
            }
            for number, source in enumerate(entry.prompts.files)
        ],
        "held_out": entry.prompts.held_out,
        "split_seed": entry.prompts.seed,
        "answers": {
            "served": _served(plan, entry.answers.configuration),
            **entry.answers.model_dump(exclude={"configuration"}),
        },
        "states": {
            "served": _served(plan, entry.states.configuration),
            "layer_ids": layers.layers if layers else None,
            "staging": plan.locations(plan.serving[entry.states.configuration]).staging,
            **entry.states.model_dump(exclude={"configuration"}),
        },
        "recipe": entry.recipe.model_dump(),
        "trainer": {
            "environment_path": trainer.path,
            "version": trainer.release.version,
            "lock_sha256": sha256((ROOT / trainer.lock).read_bytes()).hexdigest(),
            "gpus": entry.gpus,
            "starter": STARTER if trainer.release.accelerator == "cpu" else None,
            "variables": trainer.release.environment,
        },
        **entry.model_dump(include={"ladder", "tokens_a_row", "rate", "publish"}),
        "evaluation": {
            "engines": [_evaluated(plan, name, entry, one) for one in entry.evaluation.configurations],
            "drafters": [_known(plan, one) for one in entry.evaluation.drafters],
            **entry.evaluation.model_dump(include={"streams", "max_tokens", "rows"}),
        },
        "publish_path": f"{plan.data.drafters}/{entry.publish}",
    }
    return TrainingJob.validated(content, f"training.{name}")


def training_files(plan: HostPlan) -> dict[str, bytes]:
    """Orders by path; they name nothing secret."""
    return {layout.training_path(name): training_job(plan, name).text().encode() for name in plan.trainings}


def prompt_files(plan: HostPlan) -> dict[str, bytes]:
    """Prompts by path: the operator's own, for the service user's eyes alone."""
    return {
        prompt_path(name, number, source): _prompts(source)
        for name, entry in plan.trainings.items()
        for number, source in enumerate(entry.prompts.files)
    }


def prompt_path(name: str, number: int, source: PromptSource) -> str:
    """Where a file of prompts lies on the host."""
    return f"{layout.TRAINING}/{name}.prompts/{number}-{Path(source.file).name}"


def _prompts(source: PromptSource) -> bytes:
    path = ROOT / source.file
    try:
        return path.read_bytes()
    except OSError as error:
        raise CatalogError(f"training.yaml: prompts.files: {path} cannot be read: {error.strerror}") from None


def _known(plan: HostPlan, name: str) -> dict[str, Any]:
    """A drafter that exists, with what the catalogue says of how it was made."""
    entry = plan.checkpoints[name]
    made = entry.provenance
    return {
        "name": name,
        "path": plan.checkpoint_paths[name],
        "origin": {"target": entry.training.target, "samples": made.samples, "states_engine": made.engine},
    }


def _served(plan: HostPlan, name: str) -> dict[str, Any]:
    configuration = plan.serving[name]
    release = plan.environments[configuration.release].release
    return {
        "name": name,
        "url": Endpoint(host=configuration.listen.host, port=configuration.listen.port).url,
        "model": served_model_name(configuration, plan.locations(configuration)),
        "private": configuration.listen.private,
        "engine": release.engine,
        "version": release.version,
    }


def _evaluated(plan: HostPlan, training: str, entry: DrafterTraining, name: str) -> dict[str, Any]:
    """An engine as a step starts it: the command line of a serving configuration, with and without a drafter."""
    configuration = plan.serving[name]
    environment = plan.environments[configuration.release]
    drain = plan.data.supervision.drain_seconds
    at = plan.locations(configuration)
    speculation = Speculation(drafter="under-test", steps=entry.evaluation.steps)
    drafting = configuration.model_copy(update={"speculation": speculation})
    with_drafter = type(at)(python=at.python, target=at.target, drafter="{drafter}")
    return {
        **{key: value for key, value in _served(plan, name).items() if key != "private"},
        "release": configuration.release,
        "base": command_line(configuration, environment.release, at, drain),
        "drafting": command_line(drafting, environment.release, with_drafter, drain),
        "steps": entry.evaluation.steps,
        "variables": {
            "PATH": f"{environment.path}/bin:{SYSTEM_PATH}",
            **jit_caches(f"{plan.data.training}/{training}/cache/{configuration.release}"),
            **engine_environment(plan, configuration),
        },
    }
