"""Where things lie on a host. The three paths an operator may move are group data (all.py); these are ours."""

LOCALE = {"LC_ALL": "C.UTF-8", "LANGUAGE": ""}
"""Environment of every command whose words we read. With LC_ALL=C.UTF-8 alone LANGUAGE still translates (gettext)."""

INSTALL = "/opt/kimi-rig"
HOSTKIT = f"{INSTALL}/hostkit"
RIGCTL = f"{HOSTKIT}/current/bin/rigctl"
RIGCTL_LINK = "/usr/local/bin/rigctl"

BUILDER = "kimi-build"
"""The system user that downloads, builds, and runs what others wrote; no engine serves as it."""

ETC = "/etc/kimi-rig"
CONFIGURATIONS = f"{ETC}/configurations"
CREDENTIALS = f"{ETC}/credentials"
API_KEY = f"{CREDENTIALS}/api-key"
ENGINE_KEY = f"{CREDENTIALS}/engine-key"
"""The key of engines behind the edge: random, made on the host, known to nobody else."""
EDGE = f"{ETC}/edge"
"""What the edge reads. Root's; its secrets are readable by the edge's user."""
VARIABLE_CREDENTIAL = "env."
"""How credentials of a unit begin that are variables of its engine."""
LOCKS = f"{ETC}/locks"
PATCHES = f"{ETC}/patches"
KERNELS = f"{ETC}/kernels"
"""Specifications of kernel wheels, one a release (rigctl kernel)."""

TRAINING = f"{ETC}/training"
"""Orders of trainings, and their prompts (rigctl train)."""

STATE = "/var/lib/kimi-rig"
SERVING = f"{STATE}/serving"
"""Facts of serving configurations that outlive a boot, a directory each."""
OVERLAYS = f"{STATE}/drafters"
"""Drafters with other layer ids in their config.json than their checkpoint has: <drafter>/<release>."""
CANARY = f"{STATE}/canary"
"""Baselines of the quality canary, by model and revision, and its last outcomes, by configuration. Root's."""
CANARY_PROMPTS = f"{ETC}/canary"
"""What each target is asked, a file a checkpoint."""
RECEIPT = f"{STATE}/receipt.json"
PROOFS = f"{STATE}/proofs"
"""Command lines that an engine's own parser has accepted, by digest."""
STATES = f"{STATE}/states"
"""States that a rollback can return to, one file each by id; the file's time is when it was put in place."""
PRESENT_STATE = f"{STATES}/present.json"
STATES_KEPT = 8
"""As many states as a host keeps, the newest ones (rigctl prune)."""
TRAINED = f"{STATE}/training"
"""Root's: what served before a training, and what it published."""
CREATED = f"{STATE}/created"
"""Append-only list of what we brought to the host; uninstall removes these and nothing else."""

RUNTIME = "/run/kimi-rig"
"""Root's. Below it, as below SERVING, LOGS and CACHE, a directory each of the service user's: see guarded.py."""
REBOOT_PENDING = f"{RUNTIME}/reboot-pending"
AT_WORK = f"{RUNTIME}/at-work.lock"
"""Held, shared, by every command of a deploy that changes the host."""
DEPLOY_LOCK = f"{RUNTIME}/deploy.lock"
LOGIN_RAN = f"{RUNTIME}/login-ran"
KEYRING_PACKAGE = f"{RUNTIME}/keyring.deb"

UNITS = "/etc/systemd/system"
UNIT_MARK = "# Written by kimi-rig"
CACHE = "/var/cache/kimi-rig"
LOGS = "/var/log/kimi-rig"
FALLBACK_UNIT = "kimi-fallback@.service"
EDGE_UNIT = "kimi-edge.service"
EDGE_USER = "kimi-edge"
"""Drop-in of a unit that still listens beyond loopback, until it is started anew behind the edge."""


def secret_path(configuration: str, variable: str) -> str:
    return f"{CREDENTIALS}/{configuration}.{variable}"


def specification_path(configuration: str) -> str:
    return f"{CONFIGURATIONS}/{configuration}.json"


def unit_name(configuration: str) -> str:
    return f"kimi-{configuration}.service"


def training_path(name: str) -> str:
    return f"{TRAINING}/{name}.json"


def training_unit(name: str) -> str:
    return f"kimi-job-train-{name}.service"
