"""The host's own authority, with the real openssl: whom it can vouch for, and when a certificate is renewed."""

from __future__ import annotations

import grp
import os
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from rigctl.cli import main
from rigctl.contract import layout
from rigctl.services import edge_certificate

pytestmark = pytest.mark.slow  # a dozen programs a test
NAMES = ["kimi-1.example.com", "10.0.0.5", "fd00::5"]


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The host's directories are the test's, and its own group reads the certificate."""
    for name in ("AUTHORITY_KEY", "AUTHORITY", "CERTIFICATE"):
        monkeypatch.setattr(edge_certificate, name, tmp_path / f"{name}.pem")
    monkeypatch.setattr(layout, "EDGE_USER", grp.getgrgid(os.getgid()).gr_name)
    monkeypatch.setattr(edge_certificate, "properties", lambda unit, wanted: dict.fromkeys(wanted, "inactive"))
    return tmp_path


def certificate(*names: str, check: bool = False) -> None:
    assert main(["edge-certificate", *(["--check"] if check else []), *names]) == 0


def openssl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)


def test_it_is_issued_once_and_is_right(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate(*NAMES, check=True)
    assert capsys.readouterr().out == "there is no certificate\n" and not [*places.iterdir()]
    certificate(*NAMES)
    files = {path.name: (stat.S_IMODE(path.stat().st_mode), path.read_bytes()) for path in places.iterdir()}
    assert {name: mode for name, (mode, _) in files.items()} == {
        "AUTHORITY_KEY.pem": 0o600,
        "AUTHORITY.pem": 0o644,
        "CERTIFICATE.pem": 0o640,
    }
    authority, leaf = str(places / "AUTHORITY.pem"), str(places / "CERTIFICATE.pem")
    for check in (["-verify_hostname", NAMES[0]], *(["-verify_ip", name] for name in NAMES[1:])):
        assert (
            openssl("verify", "-x509_strict", "-purpose", "sslserver", *check, "-CAfile", authority, leaf).returncode
            == 0
        )
    assert openssl("verify", "-verify_hostname", "other.example.com", "-CAfile", authority, leaf).returncode != 0
    capsys.readouterr()
    certificate(*NAMES)
    assert not capsys.readouterr().out
    assert files == {path.name: (stat.S_IMODE(path.stat().st_mode), path.read_bytes()) for path in places.iterdir()}


def test_it_is_renewed_by_the_same_authority(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_certificate, "DAYS", 20)
    certificate(*NAMES)
    trusted, first = (places / "AUTHORITY.pem").read_bytes(), (places / "CERTIFICATE.pem").read_bytes()
    monkeypatch.setattr(edge_certificate, "DAYS", 90)
    certificate(*NAMES)
    assert (places / "AUTHORITY.pem").read_bytes() == trusted, "clients trust it"
    assert (places / "CERTIFICATE.pem").read_bytes() != first
    assert edge_certificate.needed(NAMES) is None


@pytest.mark.parametrize("damage", ["names", "authority", "certificate", "key"])
def test_what_does_not_fit_is_issued_anew(places: Path, damage: str) -> None:
    certificate(*NAMES)
    names = NAMES
    if damage == "names":
        names = [*NAMES, "kimi.example.com"]
    else:
        (places / f"{damage.upper() if damage != 'key' else 'AUTHORITY_KEY'}.pem").unlink()
    if damage == "key":
        (places / "CERTIFICATE.pem").unlink()
    assert edge_certificate.needed(names) is not None
    certificate(*names)
    assert edge_certificate.needed(names) is None


@pytest.mark.parametrize(
    ("permitted", "other"),
    [
        (["kimi-1.example.com"], "DNS:bank.example.com"),
        (["kimi-1.example.com"], "IP:10.0.0.5"),
        (["10.0.0.5"], "DNS:bank.example.com"),
        (["10.0.0.5"], "IP:10.0.0.6"),
        (["10.0.0.5"], "IP:fd00::6"),
    ],
)
def test_its_authority_can_vouch_for_nothing_else(places: Path, permitted: Sequence[str], other: str) -> None:
    """What a thief of its key could do to those who trust it."""
    certificate(*permitted)
    (places / "extensions").write_text(f"subjectAltName={other}\n")
    key, authority, leaf = (str(places / name) for name in ("AUTHORITY_KEY.pem", "AUTHORITY.pem", "forged.pem"))
    request = openssl(
        "req",
        "-new",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-keyout",
        "/dev/null",
        "-subj",
        "/O=thief",
    )
    (places / "request").write_text(request.stdout)
    options = [
        "-CA",
        authority,
        "-CAkey",
        key,
        "-set_serial",
        "7",
        "-extfile",
        str(places / "extensions"),
        "-out",
        leaf,
    ]
    assert openssl("x509", "-req", "-in", str(places / "request"), *options).returncode == 0
    assert "permitted subtree violation" in openssl("verify", "-CAfile", authority, leaf).stderr


def test_a_failure_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(edge_certificate, "_alternative", lambda name: "nonsense")
    assert main(["edge-certificate", "kimi-1"]) == 1
    assert "rigctl edge-certificate: openssl" in capsys.readouterr().err
