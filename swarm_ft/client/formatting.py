"""Formatting of numbers and bytes for people, without a terminal library's drawing."""

from __future__ import annotations

from rich.filesize import decimal

from swarm_ft.protocol.messages.reports import ByteCounts


def printable(text: str) -> str:
    """Return `text` with control characters replaced; parts of it come from other machines."""
    return "".join(c if c.isprintable() else " " for c in text)


def clock_time(seconds: float | None) -> str:
    """Return `1:02:03` or `2:03`; `-` for None."""
    if seconds is None:
        return "-"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"


def kind_fields(sent: ByteCounts) -> dict[str, dict[str, int]]:
    """Return sent and uncompressed bytes of each kind, for JSON."""
    return {
        name: {"sent": sent_bytes, "uncompressed": uncompressed_bytes}
        for name, sent_bytes, uncompressed_bytes in _kinds(sent)
    }


def kind_lines(sent: ByteCounts) -> list[str]:
    """Return one line for each kind of traffic, for the total, and for relayed bytes."""
    kinds = [kind for kind in _kinds(sent) if kind[2]]
    if len(kinds) > 1:
        kinds.append(("in all", sent.sent_bytes, sent.uncompressed_bytes))
    lines = [f"{name:<20} {_instead_of(own, plain)}" for name, own, plain in kinds]
    if sent.relayed_bytes:
        share = sent.relayed_bytes / max(1, sent.sent_bytes)
        lines.append(f"{'over relays':<20} {decimal(sent.relayed_bytes)} ({share:.1%})")
    return lines


def _instead_of(sent_bytes: int, uncompressed_bytes: int) -> str:
    ratio = f" ({uncompressed_bytes / sent_bytes:.1f}x less)" if sent_bytes else ""
    return f"{decimal(sent_bytes)} instead of {decimal(uncompressed_bytes)}{ratio}"


def _kinds(sent: ByteCounts) -> tuple[tuple[str, int, int], ...]:
    return (
        ("forward", sent.forward_bytes, sent.forward_uncompressed_bytes),
        ("backward", sent.backward_bytes, sent.backward_uncompressed_bytes),
        ("gradients", sent.gradient_bytes, sent.gradient_uncompressed_bytes),
        ("state", sent.state_bytes, sent.state_bytes),
        ("evaluation", sent.evaluation_bytes, sent.evaluation_uncompressed_bytes),
    )


def format_traffic(sent_bytes: int, uncompressed_bytes: int) -> str:
    """Return sent and uncompressed bytes with their ratio."""
    ratio = f" {uncompressed_bytes / sent_bytes:.1f}x" if sent_bytes else ""
    return f"{decimal(sent_bytes)} of {decimal(uncompressed_bytes)}{ratio}"
