"""A certificate authority of the tests' own, for servers on loopback. Clients trust it by SSL_CERT_FILE."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import tempfile
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kimi-rig-ca-")


@cache
def authority_file() -> Path:
    """The authority's certificate; `server.pem` beside it has a server's key and certificate for loopback."""
    place = Path(_directory().name)
    key, name = ec.generate_private_key(ec.SECP256R1()), _name("kimi-rig test authority")
    root = _certificate(name, name, key.public_key())
    root = root.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    authority = root.add_extension(identifier, critical=False).sign(key, hashes.SHA256())
    server_key = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    made = _certificate(_name("127.0.0.1"), name, server_key.public_key()).add_extension(names, critical=False)
    server = made.add_extension(issuer, critical=False).sign(key, hashes.SHA256())
    secret = server_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (place / "server.pem").write_bytes(secret + server.public_bytes(serialization.Encoding.PEM))
    (place / "ca.pem").write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    return place / "ca.pem"


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), now - DAY, now + 30 * DAY)


@cache
def server_context() -> ssl.SSLContext:
    """TLS of a server on loopback."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority_file().with_name("server.pem"))
    return context
