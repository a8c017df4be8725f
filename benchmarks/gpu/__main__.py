"""`python3 -m benchmarks.gpu`: see the package's docstring."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from benchmarks.gpu import needs
from benchmarks.gpu.parts import BY_NAME, LIMIT_S, PARTS, Part
from benchmarks.gpu.report import DONE, Report, Value
from benchmarks.gpu.runner import run_all


def main() -> int:
    """Run the command; return 1 if a part did not end, or found something wrong."""
    options = _parser().parse_args()
    parts = options.part or list(PARTS)
    report = Report(machine_words(rehearse=options.rehearse))
    path: Path = options.json

    def changed() -> None:
        report.write(path)
        part = report.parts[-1]
        line = f"{part.name}: {len(part.rows)} rows, {part.how} {part.why}"
        sys.stderr.write(f"{line.rstrip()}\n")

    signal.signal(signal.SIGTERM, _leave)
    try:
        run_all(
            parts,
            report,
            changed,
            rehearse=options.rehearse,
            limit_s=options.seconds,
            rates_mbps=options.rates,
            pairs=options.pairs,
        )
    except KeyboardInterrupt:
        report.parts[-1].how = "interrupted"
    finally:
        report.write(path)
        sys.stdout.write(report.to_text() + f"\nalso in {path} and {path.with_suffix('.txt')}\n")
    return int(any(part.how != DONE or part.wrong for part in report.parts))


def machine_words(*, rehearse: bool) -> dict[str, Value]:
    """Describe the machine; load torch, if it is installed, to describe the GPU."""
    words: dict[str, Value] = {
        "rehearsal": rehearse,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "packages": ", ".join(needs.versions(needs.SWARM + needs.CODECS)),
        "to carry": ", ".join(needs.missing(needs.SWARM + needs.CODECS)) or "nothing",
    }
    if not needs.TORCH.missing:
        words["gpu"] = _gpu_words()
    return words


def _gpu_words() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none"
    made = torch.cuda.get_device_properties(0)
    gib = made.total_memory / (1 << 30)
    return f"{made.name}, {gib:.0f} GiB, CUDA {torch.version.cuda}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--part",
        type=_parts,
        help=f"with commas: {', '.join(BY_NAME)}  [default: all, in this order]",
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="small shapes, on a CPU where there is no GPU"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"that each part has  [default: {LIMIT_S:g}; a rehearsal: fewer]",
    )
    parser.add_argument(
        "--rates",
        type=lambda text: [float(rate) for rate in text.split(",")],
        default=[],
        help="Mbps of a swarm's links, with commas, in this order; 0: not paced",
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=0,
        help="of codecs that a swarm trains by, the default first  [default: all]",
    )
    parser.add_argument(
        "--json", type=Path, default=Path("gpu.json"), help="the table is beside it"
    )
    return parser


def _parts(text: str) -> Sequence[Part]:
    unknown = [name for name in text.split(",") if name not in BY_NAME]
    if unknown:
        raise argparse.ArgumentTypeError(f"no part {', '.join(unknown)}: {', '.join(BY_NAME)}")
    return [BY_NAME[name] for name in text.split(",")]


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
