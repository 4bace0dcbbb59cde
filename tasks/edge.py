"""Edge: TLS and API keys on one port, in front of engines on loopback. Its packages and the engines' key: base."""

from pyinfra.api import deploy

from rig.artifacts.edge import ACME_ROOTS, CERTIFICATE, KEYS, certification, edge_files, keys_map
from rig.operations import edge as operations
from rig.operations.files import File, present, secret
from rig.operations.system import system_users
from rig.plan.current import current_plan, operator_certificate, operator_key_digest, operator_roots
from rig.plan.edge import takeovers
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout

SYSUSERS = "/etc/sysusers.d/kimi-edge.conf"


@deploy("Edge")
def edge(plan: HostPlan) -> None:
    if plan.edge is None:
        return
    user = layout.EDGE_USER
    tls = plan.edge.tls
    declaration = f'u {user} - "Edge (kimi-rig)" / /usr/sbin/nologin\n'
    present(name="Declare the edge's user", entries=[File(SYSUSERS, declaration.encode())])
    system_users(name=f"Create user {user}", users=[user], declaration=SYSUSERS)
    operations.engine_key_known(name="Give the edge the engines' key")
    digests = {name: operator_key_digest(source, f"edge.keys.{name}") for name, source in plan.edge.keys.items()}
    secret(name="Store digests of keys", path=KEYS, content=keys_map(digests).encode(), group=user)
    if tls is not None and tls.certificate and tls.key:
        content = operator_certificate(tls.certificate, tls.key)
        secret(name="Store the certificate", path=CERTIFICATE, content=content, group=user)
    elif tls is not None and tls.acme and tls.acme.roots:
        roots = File(ACME_ROOTS, operator_roots(tls.acme.roots))
        present(name="Store roots of the ACME authority", entries=[roots])
    files = edge_files(plan)
    if issued := certification(files):
        operations.certified(name="Certify the edge", command=issued[0], path=issued[1])
    read = [File(path, text.encode()) for path, text in files.items() if path.startswith(f"{layout.EDGE}/")]
    operations.running(name="Let the edge serve", files=read, takeovers=[*takeovers(plan.edge)])


if __name__ == "builtins":
    edge(plan=current_plan())
