"""``python -m tests.zoo.run``: judge classes of the zoo and write the tables under ``docs/``."""

import argparse
import sys
import time
from collections import Counter

from tests.zoo import table
from tests.zoo.build import class_names
from tests.zoo.judge import Row
from tests.zoo.paths import DEFAULT_PATHS, PATHS
from tests.zoo.pool import rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", choices=list(PATHS), action="append", help='may be repeated; "apply" when left out')
    parser.add_argument("--only", default="", help="classes, separated by commas; all of them when left out")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=180, help="seconds that one class may take")
    parser.add_argument("--dry", action="store_true", help="write no tables")
    options = parser.parse_args(arguments)
    names = [name for name in class_names() if not options.only or name in options.only.split(",")]
    started, counts = time.monotonic(), Counter[str]()
    for path in options.path or DEFAULT_PATHS:
        for row in rows(names, path, options.jobs, options.timeout):
            counts[row.status] += 1
            _say(_line(row))
            # Rows are kept as they come, so that an interrupted run loses nothing.
            if not options.dry:
                table.save([row])
    if not options.dry:
        _say(str(table.write()))
    _say(f"{dict(counts)} in {time.monotonic() - started:.0f} s")
    return 1 if counts["WRONG"] else 0


def _line(row: Row) -> str:
    errors = " ".join(f"{error:.0e}" for error in (row.lossless, row.fused, row.control) if error is not None)
    layers = f"{row.quantised}/{row.kept}/{row.layers}"
    return f"{row.path} {row.name}: {row.status} {layers} {errors} {row.seconds}s {row.reason}"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
