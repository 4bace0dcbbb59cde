"""Secrets come from a file that is the operator's alone, or from a prompt, and from nowhere else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from rig.catalog.entries import ROOT
from rig.plan.secrets import SecretError, ask, hand_on, key_digest, read_certificate, read_certificates, read_secret
from tests.unit.test_converge import GPU_DATA, fake

pytestmark = pytest.mark.slow


def test_a_file_of_one_line(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("  s3cret\n")
    path.chmod(0o600)
    assert read_secret(str(path), "API key") == b"s3cret"


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("k", 0o640, "readable by others"),
        ("", 0o600, "must give one line"),
        ("a\nb", 0o600, "must give one line"),
        ("a\rb", 0o600, "no key or token has"),
        ("schl\u00fcssel", 0o600, "no key or token has"),
    ],
)
def test_wrong_files(tmp_path: Path, content: str, mode: int, message: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(SecretError, match=message):
        read_secret(str(path), "API key")


def private(path: Path, text: str) -> str:
    path.touch(0o600)
    path.write_text(text)
    return str(path)


def test_of_a_clients_key_the_digest_is_known(tmp_path: Path) -> None:
    key = private(tmp_path / "key", "s3cret\n")
    digest = "1ec1c26b50d5d3c58d9583181af8076655fe00756bf7285940ba3670f99fcba0"
    assert key_digest(key, "edge.keys.alice") == key_digest(f"sha256:{digest}", "edge.keys.alice") == digest
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(SecretError, match=r"edge\.keys\.alice: .* readable by others"):
        key_digest(key, "edge.keys.alice")


CERTIFICATE = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
PRIVATE_KEY = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"


def test_a_certificate_and_its_key_are_one_file(tmp_path: Path) -> None:
    key = private(tmp_path / "key", PRIVATE_KEY)
    chain = private(tmp_path / "chain", CERTIFICATE * 2)
    assert read_certificate(chain, key).decode() == CERTIFICATE * 2 + PRIVATE_KEY


@pytest.mark.parametrize(
    ("certificate", "key", "mode", "message"),
    [
        (CERTIFICATE, PRIVATE_KEY, 0o640, "key of the certificate: .* is readable by others"),
        (CERTIFICATE, CERTIFICATE, 0o600, "holds no private key"),
        (CERTIFICATE, PRIVATE_KEY.replace(" PRIVATE", " ENCRYPTED PRIVATE"), 0o600, "without a password"),
        (PRIVATE_KEY, PRIVATE_KEY, 0o600, "does not begin with a certificate"),
        ("", PRIVATE_KEY, 0o600, "does not begin with a certificate"),
        ("\x00\xff", PRIVATE_KEY, 0o600, "does not begin with a certificate"),
    ],
)
def test_wrong_certificates(tmp_path: Path, certificate: str, key: str, mode: int, message: str) -> None:
    paths = private(tmp_path / "chain", certificate), private(tmp_path / "key", key)
    (tmp_path / "key").chmod(mode)
    with pytest.raises(SecretError, match=message):
        read_certificate(*paths)
    with pytest.raises(SecretError, match="nowhere cannot be read: No such file"):
        read_certificates("/nowhere")


def test_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(SecretError, match="cannot be read: No such file"):
        read_secret(str(tmp_path / "key"), "API key")


def test_a_prompt_without_a_terminal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: PTH123, SIM115  # closed with the process
    ask.cache_clear()
    with pytest.raises(SecretError, match="no terminal"):
        read_secret("prompt", "API key")


def test_children_read_what_is_handed_on() -> None:
    command = [sys.executable, "-c", f"print(open({hand_on(b's3cret')!r}).read())"]
    assert subprocess.run(command, close_fds=False, capture_output=True, text=True, check=True).stdout == "s3cret\n"


def test_the_wrapper_asks_once_and_shows_nothing(tmp_path: Path) -> None:
    path = tmp_path / "hosts.py"
    path.write_text(f"gpu = [{(fake('one')[0], {**fake('one')[1], 'api_key_file': 'prompt'})!r}]\n")
    command = [sys.executable, "-m", "rig", "plan", str(path), *GPU_DATA]
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=slave,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    output = process.stdout.readline(len("API key"))
    os.write(master, b"typed-s3cret\n")
    output += process.communicate(timeout=60)[0]
    assert "Store the api-key" in output
    assert "typed-s3cret" not in output and "s3cret" not in str(process.args)
    os.close(master)
    os.close(slave)
