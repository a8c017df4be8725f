"""A swarm's authority: the key that says who takes part, kept in a folder of its owner's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

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
    parsed_key,
    write_private,
)
from swarm_ft.identity.records import Signer
from swarm_ft.identity.roles import COORDINATOR_NAME, Caller, Role
from swarm_ft.private_files import make_private, private_folder

KEY_FILE, CERTIFICATE_FILE, COORDINATOR_FILE = "authority.key", "authority.pem", "coordinator.key"
PAGE_KEY_FILE, PAGE_CERTIFICATE_FILE = "page.key", "page.crt"
SUBJECT = "swarm-ft authority"


@dataclass(frozen=True, kw_only=True, slots=True)
class WebCertificate:
    """By what browsers know a server.

    Attributes:
        key: its file.
        certificate: its file.
        names: hosts and addresses that browsers may call it by, the best one first.
        fingerprint: of the certificate, SHA-256, as browsers show it.
    """

    key: Path
    certificate: Path
    names: tuple[str, ...]
    fingerprint: str


def utc_now() -> datetime:
    """The time by which certificates begin and end."""
    return datetime.now(UTC)


class Authority:
    """See the module's docstring; use `make` once, then `open`.

    Args:
        folder: where its files lie.
        key: that signs.
        certificate: of that key, by itself.
        now: what time it is.
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
        """A new authority, with files in `folder`.

        Args:
            folder: where its files are to lie.
            replaces: it takes the place of the one that is there: all that it signed is void.

        Raises:
            BadOption: there is one already, or is none to replace, or the folder cannot be written.
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
        """The authority whose files lie in `folder`.

        Raises:
            BadOption: there is none, or its files do not belong together.
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
        key = parsed_key(pem, folder / KEY_FILE)
        if not is_of(certificate, fingerprint_of(key.public_key())):
            raise BadOption(f"{folder}: key and certificate do not belong together")
        return cls(folder, key, certificate, now)

    @property
    def fingerprint(self) -> bytes:
        """By which members know it."""
        return fingerprint_of(self._key.public_key())

    @property
    def signer(self) -> Signer:
        """Signs where the coordinator is."""
        return Signer(self._key)

    def issue(self, holder: Caller) -> Certificate:
        """A certificate of what somebody is, for a day."""
        return issue(self.certificate, self._key, holder, self._now())

    def rotate_coordinator(self) -> None:
        """Give the coordinator a new key, which it shows once it looks; its page when it starts.

        Raises:
            BadOption: the key's file cannot be written.
        """
        path = self.folder / COORDINATOR_FILE
        try:
            write_private(path, key_pem(new_key()))
            (self.folder / PAGE_KEY_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise BadOption(f"key file {path}: {error.strerror or error}") from None

    def coordinator(self) -> tuple[PrivateKey, Certificate]:
        """The coordinator's own key, and a certificate for it.

        Raises:
            BadOption: the key's file cannot be read or written.
        """
        key = key_at(self.folder / COORDINATOR_FILE)
        holder = Caller(role=Role.COORDINATOR, name=COORDINATOR_NAME, key=key.public_key())
        return key, self.issue(holder)

    def web(self, names: Iterable[str]) -> WebCertificate:
        """The key of the coordinator's page and a certificate for it, made once and kept.

        The certificate is another one when a name comes that it has not, when half of its time is
        over, and when the key or the authority is another.

        Raises:
            BadOption: a file cannot be read or written.
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
    """None: there is none, or it is damaged; another one does as well."""
    try:
        make_private(path)
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
