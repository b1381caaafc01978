"""A certificate for "localhost" that the server signs itself."""

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Return the files of a certificate and its private key; make them if they are missing."""
    certificate, private = folder / "certificate.pem", folder / "private.pem"
    if certificate.exists():
        return certificate, private
    key, serial = ec.generate_private_key(ec.SECP256R1()), x509.random_serial_number()
    # two trusted certificates must not have one name
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"localhost {serial:x}")])
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), serial)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=365))
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private.touch(0o600)
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    certificate.write_bytes(made.public_bytes(pem))
    return certificate, private
