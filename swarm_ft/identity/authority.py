"""A swarm's authority: the key that certifies members, in a folder of its owner's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from swarm_ft.base.private_files import make_private, private_folder
from swarm_ft.errors import BadOption
from swarm_ft.identity.certificates import (
    AUTHORITY_LIFETIME_S,
    Certificate,
    authority_certificate,
    is_of,
    is_web_of,
    issue,
    issue_web,
    shown_fingerprint,
    to_pem,
)
from swarm_ft.identity.keys import (
    PrivateKey,
    fingerprint_of,
    key_at,
    key_pem,
    new_key,
    parse_key,
    write_private,
)
from swarm_ft.identity.records import Signer
from swarm_ft.identity.roles import COORDINATOR_NAME, Caller, Role

KEY_FILE, CERTIFICATE_FILE, COORDINATOR_FILE = "authority.key", "authority.pem", "coordinator.key"
PAGE_KEY_FILE, PAGE_CERTIFICATE_FILE = "page.key", "page.crt"
SUBJECT = "swarm-ft authority"


@dataclass(frozen=True, kw_only=True, slots=True)
class WebCertificate:
    """Certificate by which browsers verify a server.

    Attributes:
        key: File of the private key.
        certificate: File of the certificate.
        names: Hosts and addresses of the server that it covers, the best one first.
        fingerprint: SHA-256 of the certificate, as browsers show it.
    """

    key: Path
    certificate: Path
    names: tuple[str, ...]
    fingerprint: str


def utc_now() -> datetime:
    """Return the present time in UTC."""
    return datetime.now(UTC)


class Authority:
    """Authority of a swarm; see the module's docstring. Use `make` once, then `open`.

    Args:
        folder: Folder of its files.
        key: Private key that signs.
        certificate: Certificate of that key, signed by itself.
        now: Returns the present time.
    """

    def __init__(
        self,
        folder: Path,
        key: PrivateKey,
        certificate: Certificate,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.folder = folder
        self.certificate = certificate
        self._key = key
        self._now = now

    @classmethod
    def make(cls, folder: Path, *, replaces: bool = False) -> Authority:
        """Return a new authority, with files in `folder`.

        Args:
            folder: Folder for its files.
            replaces: Whether it replaces the authority there, whose signatures become void.

        Raises:
            BadOption: The folder has an authority already, or has none to replace, or cannot be
                written.
        """
        key = new_key()
        certificate = authority_certificate(key, SUBJECT, AUTHORITY_LIFETIME_S, utc_now())
        try:
            if (folder / KEY_FILE).exists() != replaces:
                is_there = "is no authority to replace" if replaces else "is an authority already"
                raise BadOption(f"{folder}: there {is_there}; it stays as it is")
            private_folder(folder)
            for name in (COORDINATOR_FILE, PAGE_KEY_FILE):
                (folder / name).unlink(missing_ok=True)
            write_private(folder / CERTIFICATE_FILE, to_pem(certificate))
            write_private(folder / KEY_FILE, key_pem(key))
        except OSError as error:
            raise BadOption(f"{folder}: {error.strerror or error}") from None
        return cls(folder, key, certificate)

    @classmethod
    def open(cls, folder: Path, now: Callable[[], datetime] = utc_now) -> Authority:
        """Return the authority whose files lie in `folder`.

        Raises:
            BadOption: The folder has none, or its files do not belong together.
        """
        try:
            make_private(folder)
            make_private(folder / KEY_FILE)
            pem = (folder / KEY_FILE).read_bytes()
            certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE_FILE).read_bytes())
        except OSError as error:
            raise BadOption(
                f"{folder}: {error.strerror or error}; 'swarm-ft init' makes a swarm's keys"
            ) from None
        except ValueError:
            raise BadOption(f"{folder / CERTIFICATE_FILE}: expected a certificate") from None
        key = parse_key(pem, folder / KEY_FILE)
        if not is_of(certificate, fingerprint_of(key.public_key())):
            raise BadOption(f"{folder}: key and certificate do not belong together")
        return cls(folder, key, certificate, now)

    @property
    def fingerprint(self) -> bytes:
        """Fingerprint of the authority's key, by which members know it."""
        return fingerprint_of(self._key.public_key())

    @property
    def signer(self) -> Signer:
        """Signer of the coordinator's record."""
        return Signer(self._key)

    def issue(self, holder: Caller) -> Certificate:
        """Return a certificate of a member's role and name, valid for a day."""
        return issue(self.certificate, self._key, holder, self._now())

    def rotate_coordinator(self) -> None:
        """Replace the coordinator's key, which it loads while it runs; its page does at a start.

        Raises:
            BadOption: The key's file cannot be written.
        """
        path = self.folder / COORDINATOR_FILE
        try:
            write_private(path, key_pem(new_key()))
            (self.folder / PAGE_KEY_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise BadOption(f"key file {path}: {error.strerror or error}") from None

    def coordinator(self) -> tuple[PrivateKey, Certificate]:
        """Return the coordinator's own key, and a certificate for it.

        Raises:
            BadOption: The key's file cannot be read or written.
        """
        key = key_at(self.folder / COORDINATOR_FILE)
        holder = Caller(role=Role.COORDINATOR, name=COORDINATOR_NAME, key=key.public_key())
        return key, self.issue(holder)

    def web(self, names: Iterable[str]) -> WebCertificate:
        """Return the key of the coordinator's page and a certificate, from files if still usable.

        A new certificate replaces the old one for a name that it lacks, after half of its lifetime,
        and after a change of the key or the authority.

        Raises:
            BadOption: A file cannot be read or written.
        """
        names = tuple(names)
        key_path, path = self.folder / PAGE_KEY_FILE, self.folder / PAGE_CERTIFICATE_FILE
        key = key_at(key_path).public_key()
        try:
            found = _certificate_at(path)
            if found is None or not is_web_of(found, self.certificate, key, names, self._now()):
                found = issue_web(self.certificate, self._key, key, names, self._now())
                write_private(path, to_pem(found))
        except OSError as error:
            raise BadOption(f"{path}: {error.strerror or error}") from None
        return WebCertificate(
            key=key_path, certificate=path, names=names, fingerprint=shown_fingerprint(found)
        )


def _certificate_at(path: Path) -> Certificate | None:
    """Return the certificate in a file; None if the file is missing or damaged."""
    try:
        make_private(path)
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
