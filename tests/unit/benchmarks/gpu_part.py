"""A double of a part's process: it prints a row, and then ends by its name."""

import json
import sys


def print_document(words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def main() -> None:
    name = sys.argv[1]
    print_document({"name": name, "n": 1})
    if name == "lasts":
        sys.stdin.read()
    if name == "breaks":
        sys.exit(3)
    print_document({"end": "it says why" if name == "fails" else ""})


main()
