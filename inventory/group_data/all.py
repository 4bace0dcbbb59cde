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
base_packages = ["ca-certificates", "python3", "python3-venv", "rsync"]

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

# --- Benchmark (benchmark.py) ----------------------------------------------------------------------------------------

# Sweep of inventory/benchmark.yaml.
bench_sweep = "default"
# Configurations to measure, names between spaces or a list; None is all of this host's.
bench_configurations = None
