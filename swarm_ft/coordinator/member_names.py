"""Names of a swarm's members for people: each name stands for one member. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from swarm_ft.protocol.messages.enrolment import NamedMember
from swarm_ft.protocol.spec.bounds import MAX_TEXT_BYTES, cut_text
from swarm_ft.protocol.spec.member_name import (
    default_name,
    distinct_name,
    ids_in,
    is_meant,
    is_member_id,
    skeleton_of,
)


class MemberNames:
    """The names that members and invitations chose, and the unique names that follow from them."""

    def __init__(self) -> None:
        self._chosen: dict[str, str] = {}
        self._revoked: Set[str] = frozenset()
        self._holders: dict[str, set[str]] = {}
        self._shown: dict[str, str] = {}

    def replace(self, chosen: Mapping[str, str], revoked: Set[str] = frozenset()) -> None:
        """Replace all names.

        Args:
            chosen: The chosen name of each member by its id; empty: it chose none.
            revoked: Ids of members whose names are free for others.
        """
        if chosen == self._chosen and revoked == self._revoked:
            return
        self._chosen, self._revoked = dict(chosen), revoked
        self._holders = {}
        self._shown.clear()
        for member_id in chosen.keys() - revoked:
            self._hold(member_id)

    def add(self, member_id: str, chosen_name: str = "") -> None:
        """Add a member, or its newly chosen name; empty leaves the name that it has."""
        chosen_name = chosen_name or self._chosen.get(member_id, "")
        if self._chosen.get(member_id) == chosen_name:
            return
        self._shown.clear()
        before = self._holders.get(skeleton_of(self._plain(member_id)))
        if before is not None:
            before.discard(member_id)
        self._chosen[member_id] = chosen_name
        self._hold(member_id)

    def shown(self, member_id: str) -> str:
        """Return a member's unique name; a text that is no member id is returned as it is."""
        known = self._shown.get(member_id)
        if known is None:
            known = self._apart(member_id)
            if member_id in self._chosen:  # others are unbounded
                self._shown[member_id] = known
        return known

    def _apart(self, member_id: str) -> str:
        plain = self._plain(member_id)
        if not is_member_id(member_id):
            return plain
        others = self._holders.get(skeleton_of(plain), set()) - {member_id}
        return distinct_name(plain, member_id, others)

    def found(self, text: str) -> tuple[str, ...]:
        """Return the ids of all members that a text of a command line may mean, see `is_meant`."""
        if text in self._chosen:
            return (text,)
        return tuple(one for one in self._chosen if is_meant(text, one, self.shown(one)))

    def of(self, member_ids: Iterable[str], max_names: int) -> tuple[NamedMember, ...]:
        """Return the names that do not follow from their ids, for a message.

        Args:
            member_ids: The members that the message mentions.
            max_names: Names that the message may have.
        """
        shown = ((one, self.shown(one)) for one in dict.fromkeys(member_ids))
        named = [
            NamedMember(member_id=i, name=name) for i, name in shown if name != default_name(i)
        ]
        return tuple(named[:max_names])

    def in_text(self, text: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
        """Return a text for people with names in place of the ids of known members.

        Args:
            text: The text, such as a reason in words.
            max_bytes: Bytes of UTF-8 that the result may have; the rest is cut off.
        """
        pieces, end = [], 0
        for found in ids_in(text):
            if found[0] in self._chosen:
                pieces += [text[end : found.start()], self.shown(found[0])]
                end = found.end()
        return cut_text("".join((*pieces, text[end:])), max_bytes)

    def _plain(self, member_id: str) -> str:
        return self._chosen.get(member_id) or default_name(member_id)

    def _hold(self, member_id: str) -> None:
        self._holders.setdefault(skeleton_of(self._plain(member_id)), set()).add(member_id)


NO_NAMES: MemberNames = MemberNames()
"""The names of a swarm without keys: every name is a peer id."""
