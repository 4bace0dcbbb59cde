"""Directories and files that every host gets."""

from rig.operations.files import Directory, File, Link
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout

SYSUSERS = "/etc/sysusers.d/kimi-rig.conf"


def base_paths(plan: HostPlan) -> list[Directory | File | Link]:
    """Directories and files every host gets. Those that may be the operator's have no owner or mode of ours."""
    user = plan.data.service_user
    declaration = f'u {user} - "Kimi-K2.5 serving (kimi-rig)" / /usr/sbin/nologin\n'
    declaration += f'u {layout.BUILDER} - "Downloads and builds (kimi-rig)" / /usr/sbin/nologin\n'
    return [
        *(Directory(path, "0755", "root", "root") for path in (layout.INSTALL, layout.HOSTKIT, layout.ETC)),
        *(Directory(path, "0755", "root", "root") for path in (layout.CONFIGURATIONS, layout.LOCKS, layout.STATE)),
        *(Directory(path, "0755", "root", "root") for path in (layout.CACHE, layout.LOGS)),
        Directory(layout.CREDENTIALS, "0700", "root", "root"),
        Directory(plan.data.ml_env),
        Directory(plan.data.models),
        Directory(plan.data.drafters),
        File(SYSUSERS, declaration.encode()),
        Link(layout.RIGCTL_LINK, layout.RIGCTL),
    ]
