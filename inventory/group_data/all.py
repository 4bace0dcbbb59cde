"""Every tunable of a host, with its default. gpu.py and sandbox.py change what differs; a host's own data wins."""

# --- Paths: the three an operator may want to move -------------------------------------------------------------------

# Engine environments: <ml_env>/<release>/<digest>. Needs about 11 GB an engine release.
ml_env = "/opt/kimi-rig/env"
# Models. Kimi-K2.5 INT4 takes 595 GB.
models = "/shared"
# Drafters.
drafters = "/data/eagle3"

# --- What is installed -----------------------------------------------------------------------------------------------

# Serving configurations of inventory/serving.yaml that this host gets a unit for; None is all of them.
configurations = None
# A file of inventory/overlays/ that changes catalogue entries for this host.
catalogue_overlay = None
# Debian/Ubuntu packages the host needs.
base_packages = ["ca-certificates", "curl", "python3", "python3-venv", "rsync"]

# --- Serving ---------------------------------------------------------------------------------------------------------

# System user the engines run as: no shell, no home.
service_user = "kimi"
# The one configuration started at boot, or None.
enable_at_boot = None
# What a deploy does with a running service whose unit, environment or checkpoint changed: "never" restarts it (it is
# shown as stale), "now" restarts it at once.
restart = "never"

# --- Secrets: a file on the machine you deploy from, readable by you alone, or "prompt" ------------------------------

# API key the engines demand; needed where a configuration listens beyond loopback.
api_key_file = None
# Token for gated repositories of the model hub.
hub_token_file = None

# --- The host itself -------------------------------------------------------------------------------------------------

# Settings that the topology policy decides, decided here instead: "<kind>.<name>" -> value, or None to leave one alone.
# `make explain` lists all names. {"kernel_argument.iommu": "pt", "power_limit.watts": "450"}
host_overrides: dict[str, str | None] = {}
# What a deploy does when boot-time settings wait for a reboot: "no" marks them pending, "yes" reboots and proves them.
reboot = "no"
# NVIDIA's driver with the open kernel modules, for a host that has none. Ubuntu and Debian packages of its repository.
driver_packages = ["nvidia-open"]
# The package that brings repository and key, by system: URL and sha256.
driver_keyring = {
    "ubuntu-24.04": [
        "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64/cuda-keyring_1.1-1_all.deb",
        "d2a6b11c096396d868758b86dab1823b25e14d70333f1dfa74da5ddaf6a06dba",
    ],
    "debian-12": [
        "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/cuda-keyring_1.1-1_all.deb",
        "e7f219eab6fe4819cdb5c15b98233dc3420302d9c00883219cd3d896857cf48d",
    ],
}
# Replace a working driver that is older than the engine releases need. Never done unasked.
driver_upgrade = False
# URLs the host must reach; the preflight names those it cannot.
probes: list[str] = []
