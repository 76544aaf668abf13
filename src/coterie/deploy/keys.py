"""Certificates and keys of a federation. Only their owner can read the files."""

import datetime
import ipaddress
import secrets
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from coterie.engines.relay import private

YEARS = 2


def certificates(folder: Path, hosts: list[str]) -> None:
    """Write a certificate authority, and the SuperLink's certificate for names and addresses.

    Nodes only need `ca.crt`. `ca.key` can be stored elsewhere once all certificates are made.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=365 * YEARS)
    ca_key, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Coterie deployment")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    ca_id = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca = (
        x509.CertificateBuilder()
        .subject_name(issuer)
        .issuer_name(issuer)
        .public_key(ca_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **usage),
            critical=True,
        )
        .add_extension(ca_id, critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    server = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_name(host) for host in hosts]), critical=False)
        .add_extension(
            x509.KeyUsage(digital_signature=True, key_cert_sign=False, crl_sign=False, **usage),
            critical=True,
        )
        .add_extension(
            x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ca_id), critical=False
        )
        .sign(ca_key, hashes.SHA384())
    )
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(ca.public_bytes(pem))
    (folder / "server.crt").write_bytes(server.public_bytes(pem))
    for name, secret in (("ca.key", ca_key), ("server.key", key)):
        form = serialization.PrivateFormat.PKCS8
        private(folder / name, secret.private_bytes(pem, form, serialization.NoEncryption()))


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def node_key(path: Path) -> Path:
    """Write the key pair of a node; the server registers the public key, `.pub`."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    secret = ec.generate_private_key(ec.SECP384R1())
    form = serialization.PrivateFormat.OpenSSH
    pem = serialization.Encoding.PEM
    private(path, secret.private_bytes(pem, form, serialization.NoEncryption()))
    public = path.with_name(path.name + ".pub")
    public.write_bytes(
        secret.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    )
    return public


def secret(path: Path) -> None:
    """Write 32 random bytes to a file."""
    private(path, secrets.token_bytes(32))
