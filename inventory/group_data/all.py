"""Every tunable of a host, with its default. gpu.py and sandbox.py change what differs; a host's own data wins."""

# --- Paths: the three an operator may want to move -------------------------------------------------------------------

# Engine environments: <ml_env>/<release>/<digest>. Needs about 11 GB an engine release.
ml_env = "/opt/kimi-rig/env"
# Directory on the host with every wheel of the locks: no package index is asked (docs/how-to/releases.md). None: the
# index is.
wheels = None
# Models. Kimi-K2.5 INT4 takes 595 GB.
models = "/shared"
# Drafters.
drafters = "/data/eagle3"
# Trainings of drafters: <training>/<name>. Hidden states of Kimi-K2.5 take 57 KB a token.
training = "/data/training"

# --- What is installed -----------------------------------------------------------------------------------------------

# Serving configurations of inventory/serving.yaml that this host gets a unit for; None is all of them.
configurations = None
# Trainings of inventory/training.yaml that this host can run: it gets their trainer and configurations.
trainings: list[str] = []
# A file of inventory/overlays/ that changes catalogue entries for this host.
catalogue_overlay = None
# Debian/Ubuntu packages the host needs.
base_packages = ["ca-certificates", "curl", "python3", "python3-venv", "rsync"]

# Releases that are installed although releases.yaml says that this host must not have them (known_bad with refuse).
accept_known_bad: list[str] = []
# "yes" lets a deploy bring back the state that `make rollback` left.
roll_forward = "no"

# Where kernel wheels are looked for before they are built, and put once they are: a directory that hosts share, or
# HOST:DIRECTORY, reached by rsync over SSH. A wheel is taken only if shared_wheels of the release's kernel names its
# sha256. None: each host builds its own.
kernel_store = None

# --- Serving ---------------------------------------------------------------------------------------------------------

# System user the engines run as: no shell, no home.
service_user = "kimi"
# The configuration started at boot, a list of several that do not exclude each other, or None.
enable_at_boot = None
# What a deploy does with a running service whose unit, environment or checkpoint changed: "never" restarts it (it is
# shown as stale), "when-idle" restarts it as soon as no request runs, "now" at once.
restart = "never"
# Thresholds of the units. A host names only those it changes.
supervision = {
    # Load: it fails after this long without a new log line, processor time, I/O or change of GPU memory ...
    "no_progress_minutes": 25,
    # ... or this long with nothing but processor time (a hung collective spins). February's longest load took 35 min.
    "busy_only_minutes": 60,
    # Processor time counts from this share of one core on, I/O and GPU memory from this much between two samples.
    "busy_share": 0.05,
    "io_mib": 1,
    "gpu_step_mib": 16,
    "sample_seconds": 10,
    # Before the start: a GPU with less in use than this is free; so long its last owner may take to give it back.
    "gpu_free_mib": 1024,
    "gpu_wait_seconds": 60,
    # Size of the unit's own /dev/shm (tmpfs syntax), and what must be free in it and on the disk of caches and logs.
    "shared_memory": "50%",
    "minimum_shm_mib": 512,
    "minimum_disk_mib": 2048,
    # Longest wait for one answer of the acceptance: a first request may compile kernels.
    "acceptance_seconds": 600,
    # Engines count speculation up to so long after the answer. An answer of at least so many words is degenerate when
    # one of them has this share of it (or when it is one character over and over).
    "settle_seconds": 3,
    "repeated_words": 8,
    "repeated_share": 0.6,
    # Watchdog: a small completion every so often; an answer may take so long before the counters are asked instead.
    "watch_seconds": 30,
    "watch_answer_seconds": 60,
    # It restarts an engine that for so long neither answered nor moved a counter, or gave so many wrong answers.
    "frozen_minutes": 10,
    "errors_in_a_row": 3,
    # Tokens a step below which a drafter counts as slower than none, measured over so many steps of others' requests.
    "acceptance_floor": 1.25,
    "window_drafts": 200,
    # After a crash: so many restarts in a row, the first after the delay, each next after twice that, up to the limit.
    # A run that served for so long starts the count anew.
    "restarts": 3,
    "restart_delay_seconds": 10,
    "restart_delay_limit_seconds": 300,
    "healthy_minutes": 60,
    # Stop: running requests may take so long, then the engine itself so long before it is killed.
    "drain_seconds": 60,
    "stop_seconds": 60,
    # Log files, one a run, beside the journal.
    "kept_runs": 10,
    "run_log_mib": 64,
}

# --- Secrets: a file on the machine you deploy from, readable by you alone, or "prompt" ------------------------------

# API key that clients send; needed where a configuration listens beyond loopback, and then a key of the edge.
api_key_file = None
# What other machines reach: one address with TLS and named keys, in front of engines on loopback. None: none, unless a
# configuration listens beyond loopback. docs/reference/edge.md has every key.
# {"address": "10.0.0.5", "port": 8443, "tls": {"authority": ["kimi-1.example.com"]}, "keys": {"alice": "~/alice.key"}}
edge = None
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
# CUDA toolkit to build with, and for engines that compile at serve time (CUDA_HOME; 12.9 or newer). None: the newest in
# /usr/local that suits the release, where there is one; a release that brings its own compiler uses that.
cuda_home = None
# URLs the host must reach; the preflight names those it cannot.
probes: list[str] = []

# --- Benchmark (benchmark.py) ----------------------------------------------------------------------------------------

# Sweep of inventory/benchmark.yaml.
bench_sweep = "default"
# Configurations to measure, names between spaces or a list; None is all of this host's.
bench_configurations = None
