"""What people see of the mistakes of their first hour: ``python -m tests.mistakes [word ...]``."""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap

from tests.mistakes.cases import MISTAKES, seen
from tests.workers import Workers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mistakes whose titles have one of these")
    words = parser.parse_args().words
    workers, unclear = Workers(2), 0
    for name, each in MISTAKES.items():
        if words and not any(word in each.title for word in words):
            continue
        texts = workers.run(seen, name) if each.ranks else [seen(name)]
        missing = each.missing(texts)
        print(f"\n── {each.title}\n")
        print(textwrap.indent(inspect.getsource(each.run).split("\n", 2)[-1].rstrip(), "  "), "\n")
        for rank, text in enumerate(dict.fromkeys(texts)):
            print(textwrap.indent("\n".join(textwrap.wrap(text, 116)) or "nothing is said", f"  {rank}> "))
        if missing:
            unclear += 1
            print(f"\n  it does not say: {', '.join(missing)}")
    print(f"\n{unclear} of {len(MISTAKES)} messages lack something")
    return unclear


if __name__ == "__main__":
    sys.exit(main())
