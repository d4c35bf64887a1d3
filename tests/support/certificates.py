"""A certificate for a test's server, which nobody has signed but itself."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


def self_signed(folder: Path, name: str = "runs.example.org") -> tuple[Path, Path]:
    """Writes a certificate for a name and 127.0.0.1, and its key; returns both files."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate, secret = folder / "runs.pem", folder / "runs.key"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(_pem(key))
    return certificate, secret


def new_key(passphrase: bytes | None = None) -> bytes:
    """Returns another key."""
    return _pem(ec.generate_private_key(ec.SECP256R1()), passphrase)


def _pem(key: ec.EllipticCurvePrivateKey, passphrase: bytes | None = None) -> bytes:
    hidden = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden)
