"""Serving units: a catalogue entry and the host's settings in, a unit file and a run specification out. Pure."""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from hashlib import sha256
from typing import Any

from rig.artifacts import previous_digest
from rig.artifacts.edge import edge_files
from rig.artifacts.kernel_orders import toolkit
from rig.artifacts.templates import JINJA, one_line, systemd_assignment
from rig.catalog.entries import Configuration, Source
from rig.host.live_settings import reboot_recommended
from rig.host.settings import HostSettings, Kind
from rig.plan.command_lines import command_line, served_model_name
from rig.plan.host_plan import HostPlan, both_claim, canonical_digest
from rigctl.contract import layout
from rigctl.contract.run_specification import LiveSettings, RunSpecification
from rigctl.contract.served_checkpoints import DrafterPair, DrafterPairs, ServedCheckpoints
from rigctl.contract.speculation import EXTRACTS

# Processes of one engine talk over loopback: nothing of theirs listens elsewhere, and the unit's address filter holds.
# NCCL, Gloo and vLLM otherwise take the first interface that is not loopback (NCCL_SOCKET_IFNAME in NCCL's manual).
ONE_HOST = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


@cache
def run_specification(plan: HostPlan, name: str) -> RunSpecification:
    """What `rigctl serve` needs besides the engine's argv, which the unit carries. Raises ContractError."""
    configuration = plan.serving[name]
    environment = plan.environments[configuration.release]
    release, speculation = environment.release, configuration.speculation
    at, unit = plan.locations(configuration), unit_file(plan, name)
    content = {
        "format": RunSpecification.FORMAT,
        "name": name,
        "description": configuration.description,
        "family": plan.checkpoints[configuration.target].family,
        **configuration.model_dump(include={"answer", "quiet", "sampling"}),
        "engine": release.engine,
        "release": configuration.release,
        "endpoints": [configuration.listen.model_dump(include={"host", "port"})],
        "model": served_model_name(configuration, at),
        "tool_call_parser": configuration.tool_call_parser,
        "reasoning_parser": configuration.reasoning_parser,
        "api_key": credential(plan, configuration) is not None,
        "gpus": configuration.gpus,
        "target_path": at.target,
        "drafter_path": at.drafter,
        "environment_path": environment.path,
        "series": environment.series_on_host,
        "speculation": speculation
        and {
            **speculation.model_dump(include={"method", "drafter", "steps", "break_even_length"}),
            "draft_tokens": speculation.verified,
        },
        "checkpoints": used_checkpoints(plan, configuration),
        "harmless_log": release.harmless_log,
        "drain": release.drain,
        "rate_counts_bonus": release.rate_counts_bonus,
        "limits": plan.data.supervision,
        "host_settings": live_settings(
            plan.settings, {one.key for one in reboot_recommended(plan.decision_of(configuration).settings, plan.facts)}
        ),
        "unit_digest": sha256(unit.encode()).hexdigest(),
        "digest": "to be computed",
        "same_as": [],
    }
    order = RunSpecification.validated(content, f"serving.{name}")
    sources = [plan.checkpoints[used].source for used in configuration.used]
    content = started_with(order, unit, sources)
    now, before = canonical_digest(content), previous_digest.digest(content)
    return order.model_copy(update={"digest": now, "same_as": [before] if before != now else []})


def started_with(order: RunSpecification, unit: str, sources: Sequence[Source]) -> dict[str, Any]:
    """What a running engine and its supervisor were started with: where it differs, a restart changes what runs.

    The names are this function's own, so that a format with other keys says the same; what is unset has none, so that a
    key which a later format adds changes nothing until it is used. What systemd takes over from a unit without a
    restart is left out. An addition is a name of its own: a longer list would make every unit stale.
    """
    used, drafts, trained = order.checkpoints, order.speculation, order.checkpoints.training
    limits = order.limits.model_dump(exclude={"shared_memory"})  # that is in the unit
    service = unit.partition("[Service]")[2].partition("[Install]")[0].splitlines()
    content = {
        "service": [line for line in service if line and not line.startswith("#")],
        # Of a family what the supervisor goes by: its name changes nothing.
        "quiet": order.quiet or None,
        "engine": order.engine,
        "endpoints": [endpoint.address for endpoint in order.endpoints],
        "model": order.model,
        "parsers": [order.tool_call_parser, order.reasoning_parser],
        "api key": order.api_key,
        "gpus": order.gpus,
        "paths": [order.target_path, order.drafter_path, order.environment_path, order.series],
        "speculation": drafts
        and [drafts.method, drafts.drafter, drafts.steps, drafts.draft_tokens, drafts.break_even_length],
        "checkpoints": [used.target, used.drafter, used.version, used.context, used.trust_remote_code],
        "training": trained
        and [trained.target, trained.convention, trained.layer_ids, trained.accept_mismatch, trained.notes],
        "log": order.harmless_log,
        "end": [order.drain, order.rate_counts_bonus],
        "limits": [[name, float(value)] for name, value in sorted(limits.items())],
        "sources": [_origin(source) for source in sources],
    }
    return {name: value for name, value in content.items() if value is not None}


def _origin(source: Source) -> list[Any]:
    """What decides the content of a checkpoint: a mirror or another way of transfer does not."""
    keys = ("repository", "revision", "url", "host", "path", "generator", "include", "exclude")
    return [getattr(source, key, None) for key in keys]


def live_settings(settings: HostSettings, later: Collection[str] = ()) -> LiveSettings:
    """What the supervisor looks for on the running host before it starts an engine.

    later: keys of boot-time settings that the next boot may bring, and that stop nothing before.
    """
    options = {
        module: {name: value for name, value in values.items() if f"{Kind.MODULE_OPTION}.{module}.{name}" not in later}
        for module, values in settings.module_options.items()
    }
    arguments = settings.kernel_arguments
    return LiveSettings(
        kernel_arguments=[one for one in arguments if f"{Kind.KERNEL_ARGUMENT}.{one.partition('=')[0]}" not in later],
        module_options={module: values for module, values in options.items() if values},
        sysctls=dict(settings.sysctls),
        governor=settings.governor,
        disk_scheduler=dict(settings.disk_scheduler),
        power_limit_w=settings.power_limit_w,
    )


def used_checkpoints(plan: HostPlan, configuration: Configuration) -> ServedCheckpoints:
    """What the pre-checks of a unit need to know of its checkpoints."""
    drafter = configuration.drafter
    return ServedCheckpoints(
        target=configuration.target,
        drafter=plan.derived_from.get(drafter, drafter) if drafter else None,
        version=plan.environments[configuration.release].release.version,
        context=configuration.context_length,
        trust_remote_code=configuration.trust_remote_code,
        training=plan.checkpoints[drafter].training if drafter else None,
    )


def pairs(plan: HostPlan) -> DrafterPairs:
    """Every configuration that drafts with files, as `rigctl checkpoints pairs` takes it."""
    found = []
    for name, configuration in plan.serving.items():
        at = plan.locations(configuration)
        speculation = configuration.speculation
        if speculation is None or speculation.method in ("ngram", EXTRACTS):
            continue
        # Permissions to go beyond a model's limits; the rest is no business of the fit.
        allowed = {k: v for k, v in engine_environment(plan, configuration).items() if "_ALLOW_" in k}
        found.append(
            DrafterPair(
                name=name,
                method=speculation.method,
                steps=speculation.steps,
                engine=plan.environments[configuration.release].release.engine,
                release=configuration.release,
                environment_path=plan.environments[configuration.release].path,
                target_path=at.target,
                drafter_path=at.drafter,
                checkpoint_path=plan.checkpoint_paths[speculation.drafter] if speculation.drafter else None,
                checkpoints=used_checkpoints(plan, configuration),
                environment=allowed,
            )
        )
    return DrafterPairs(pairs=found)


def engine_environment(plan: HostPlan, configuration: Configuration) -> dict[str, str]:
    """Variables of the engine process; the entry wins over the release, the release over the host's settings."""
    release = plan.environments[configuration.release].release
    home = plan.data.cuda_home or toolkit(plan, configuration.release)
    home = home or plan.environments[configuration.release].cuda_home
    cuda = {"CUDA_HOME": home} if home else {}
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, configuration.gpus))} if configuration.gpus else {}
    return {
        **ONE_HOST,
        **cuda,
        **visible,
        **plan.settings_of(configuration).environment.get(release.engine, {}),
        "HF_HUB_OFFLINE": "1",
        **release.environment,
        **configuration.environment,
    }


def conflicts(plan: HostPlan, name: str) -> list[str]:
    """Other units that claim the same GPUs or the same port: they cannot run beside this one."""
    mine = plan.serving[name]
    return sorted(
        layout.unit_name(other)
        for other, configuration in plan.serving.items()
        if other != name and both_claim(configuration, mine)
    )


def cache_directory(plan: HostPlan, name: str) -> str:
    """Where a configuration's engine keeps what it compiles.

    Compiled kernels of one release must never meet another: a new environment starts with an empty cache.
    """
    release = plan.serving[name].release
    return f"{layout.CACHE}/{name}/{release}-{plan.environments[release].path.rpartition('/')[2]}"


@cache
def unit_file(plan: HostPlan, name: str) -> str:
    unit = layout.unit_name(name)
    others = conflicts(plan, name)
    configuration = plan.serving[name]
    release = plan.environments[configuration.release].release
    limits, what = plan.data.supervision, configuration.description or name
    environment_path = plan.environments[configuration.release].path
    cache = cache_directory(plan, name)
    # Compilers at serve time are run by name: ninja lies in the engine's own environment, nvcc in the toolkit.
    engine = engine_environment(plan, configuration)
    compilers = [f"{engine['CUDA_HOME']}/bin"] if "CUDA_HOME" in engine else []
    path = ":".join([f"{environment_path}/bin", *compilers, SYSTEM_PATH])
    environment = {"PATH": path, **jit_caches(cache), **engine}
    return JINJA.get_template("kimi.service.j2").render(
        mark=layout.UNIT_MARK,
        name=name,
        description=one_line(f"{plan.checkpoints[configuration.target].called(configuration.target)}: {what}"),
        user=plan.data.service_user,
        conflicts=others,
        # Stop jobs run before start jobs between ordered units whichever way the order points (systemd.unit(5)).
        after=[other for other in others if other < unit],
        rigctl=layout.RIGCTL,
        specification=layout.specification_path(name),
        argv=command_line(configuration, release, plan.locations(configuration), limits.drain_seconds),
        environment=[systemd_assignment(key, value) for key, value in sorted(environment.items())],
        cache_name=f"{layout.CACHE.removeprefix('/var/cache/')}/{name}",
        edge=layout.EDGE_UNIT if plan.behind_edge(configuration) else None,
        credentials={
            **({"api-key": file} if (file := credential(plan, configuration)) else {}),
            **{
                f"{layout.VARIABLE_CREDENTIAL}{key}": layout.secret_path(name, key)
                for key in sorted(configuration.secrets)
            },
        },
        device_allow=plan.settings.device_allow,
        private=configuration.listen.private,
        writes=plan.locations(configuration).staging,
        fallback=layout.FALLBACK_UNIT.replace("@", f"@{name}"),
        stop_seconds=limits.drain_seconds + limits.stop_seconds + 30,
        shared_memory=limits.shared_memory,
        limits=sorted({**LIMITS, **plan.settings.limits}.items()),
        reboot_pending=layout.REBOOT_PENDING,
        systemd_failures=" ".join(map(str, SYSTEMD_FAILURES)),
    )


# In every published launch on 8 cards; the host's settings may add to them.
LIMITS = {"LimitMEMLOCK": "infinity", "LimitNOFILE": "1048576"}

# systemd's own for services (systemd.exec(5)).
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Exit codes by which systemd says that it cannot set a unit up (systemd.exec(5)): another try would end the same.
SYSTEMD_FAILURES = (200, 203, 214, 216, 217, 218, 219, 225, 226, 227, 228, 233, 234, 238, 239, 240, 241, 243)


def jit_caches(cache: str) -> dict[str, str]:
    """Where the engines and their compilers keep what they compile."""
    return {
        "HOME": cache,
        "XDG_CACHE_HOME": cache,
        "VLLM_CACHE_ROOT": f"{cache}/vllm",
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "TORCH_EXTENSIONS_DIR": f"{cache}/torch-extensions",
        "FLASHINFER_WORKSPACE_BASE": cache,
        "TVM_FFI_CACHE_DIR": f"{cache}/tvm-ffi",
        "CUTE_DSL_CACHE_DIR": f"{cache}/cute-dsl",
        # Not kept: transformers copies a checkpoint's code there, and runs an old copy that looks the same.
        "HF_MODULES_CACHE": "/tmp/modules",  # noqa: S108  # the unit's own /tmp
    }


def credential(plan: HostPlan, configuration: Configuration) -> str | None:
    """The file of the key that an engine demands; None for one that demands none."""
    if configuration.listen.private:
        return None
    if plan.behind_edge(configuration):
        return layout.ENGINE_KEY
    return layout.API_KEY if plan.data.api_key_file else None


def fallback_unit(user: str) -> str:
    """The text of the oneshot that goes back to what a failed configuration displaced."""
    return JINJA.get_template("kimi-fallback.service.j2").render(mark=layout.UNIT_MARK, rigctl=layout.RIGCTL, user=user)


@cache
def unit_files(plan: HostPlan) -> Mapping[str, str]:
    """Absolute path -> text of every unit and run specification of a host."""
    files: dict[str, str] = {f"{layout.UNITS}/{layout.FALLBACK_UNIT}": fallback_unit(plan.data.service_user)}
    for name in plan.serving:
        files[f"{layout.UNITS}/{layout.unit_name(name)}"] = unit_file(plan, name)
        files[layout.specification_path(name)] = run_specification(plan, name).text()
    return {**files, **edge_files(plan)}
