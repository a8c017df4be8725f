"""Stands for a part's process: says a row, and then what its name asks for."""

import json
import sys


def say(words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def main() -> None:
    name = sys.argv[1]
    say({"name": name, "n": 1})
    if name == "lasts":
        sys.stdin.read()
    if name == "breaks":
        sys.exit(3)
    say({"end": "it says why" if name == "fails" else ""})


main()
