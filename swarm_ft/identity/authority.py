"""A swarm's authority: the key that says who takes part, kept in a folder of its owner's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from swarm_ft.errors import BadOption
from swarm_ft.identity.certificates import (
    AUTHORITY_LIFETIME_S,
    COORDINATOR_NAME,
    Caller,
    Certificate,
    Role,
    authority_certificate,
    is_of,
    issue,
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
from swarm_ft.private_files import make_private, private_folder

KEY_FILE, CERTIFICATE_FILE, COORDINATOR_FILE = "authority.key", "authority.pem", "coordinator.key"
SUBJECT = "swarm-ft authority"


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
            (folder / COORDINATOR_FILE).unlink(missing_ok=True)
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
        """Give the coordinator a new key, which it shows once it looks.

        Raises:
            BadOption: the key's file cannot be written.
        """
        path = self.folder / COORDINATOR_FILE
        try:
            write_private(path, key_pem(new_key()))
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
