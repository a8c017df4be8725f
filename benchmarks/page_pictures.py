"""The pictures of the page in the docs: a swarm at work, and a volunteer that leaves.

    python -m benchmarks.page_pictures --out docs/images

Coordinator, peers and clients are processes, as in `benchmarks.day`, and links have keys and caps.
Two owners train; a volunteer comes, and leaves a while later: `desktop.png` is of the moment before
it goes, `phone.png` of one after that. Chromium (`apt-get install chromium`) draws them.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import tempfile
from pathlib import Path

from benchmarks.day.__main__ import opened
from benchmarks.day.swarm import Swarm
from tests.browser import Tab, browser

STEPS, EVAL_STEPS, COMES_AT, LEAVES_AT = 150, 8, 10, 40
VOLUNTEER = "ada"
CODECS = {"ann": ("aq4", "q8"), "ben": ("aq3+z", "q4")}
RUN = "state.runs[0]"
IS_MEASURED = "/Mbps/.test($('pipe').innerText) && curve.evals.length > 3"
GOES = "!!document.querySelector('.peer.goes')"


def main() -> None:
    """Draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="a folder")
    parser.add_argument("--keep", type=Path, help="a folder for logs and journal")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
        asyncio.run(_draw(options.keep or Path(folder), options.out))


async def _draw(folder: Path, out: Path) -> None:
    async with opened(Swarm(folder / "swarm", STEPS)) as swarm, browser(folder / "browser") as tab:
        await tab.resize(1380, 1250)
        await tab.open(swarm.page)
        for owner, (forward, backward) in CODECS.items():
            codecs = ("--fw", forward, "--bw", backward, "--key", "q8")
            sizes = ("--batch-size", 8, "--micro-batch-size", 2, "--eval-steps", EVAL_STEPS)
            await swarm.trains(owner, *codecs, *sizes)
            await tab.until(f"typeof state !== 'undefined' && {RUN}?.steps > 0")
        await tab.until(f"{RUN}.steps >= {COMES_AT}")
        await swarm.comes(VOLUNTEER)
        is_in = f"s => s.peer === '{swarm.names[VOLUNTEER]}' && !s.joining"
        own = f"state.runs.find(r => r.stages.some({is_in}))"
        await tab.until(f"!!{own}")
        await tab.look(f"chosen = {own}.run, isChosenByHand = true, shown(state)")
        await tab.until(f"chosenRun().steps >= {LEAVES_AT} && {IS_MEASURED}")
        await tab.until(f"chosenRun().phase === 'training' && !!{own} && {own}.run === chosen")
        peers = set(await tab.look("chosenRun().stages.map(s => s.peer)"))
        hosting = [one for one, name in swarm.names.items() if name in peers and one != VOLUNTEER]
        for machine in hosting:  # so that the step, whose end a leaver waits for, is a long one
            swarm.signals(machine, signal.SIGSTOP)
        swarm.signals(VOLUNTEER, signal.SIGINT)
        await tab.until(GOES)
        (out / "desktop.png").write_bytes(await tab.picture())
        for machine in hosting:
            swarm.signals(machine, signal.SIGCONT)
        await swarm.machines[VOLUNTEER].ends()
        await tab.resize(390, 844)
        await _settled(tab)
        (out / "phone.png").write_bytes(await tab.picture())


async def _settled(tab: Tab) -> None:
    """Wait until it trains again and the page is drawn for this screen."""
    await tab.until(f"chosenRun().phase === 'training' && !{GOES}")
    await tab.look("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


if __name__ == "__main__":
    main()
