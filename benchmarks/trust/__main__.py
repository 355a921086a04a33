"""Whether findings can be trusted: sound trainings that must be silent, planted faults that must be named.

    python -m benchmarks.trust                      record what is missing, judge all, write the dated result and page
    python -m benchmarks.trust --only 'vit-*'       some kinds or runs; prints every finding, writes nothing
    python -m benchmarks.trust --judge-only         judge what is recorded, after a rule has changed
    python -m benchmarks.trust --again --only GAN   record again, after the watch has changed

Half an hour on one core for everything; `make trust` does that. Runs stay in ``--runs`` and ``--held-back-runs``: the
second folder is not for those who tune rules.
"""

import argparse
import fnmatch
import sys
import tempfile
from pathlib import Path

from benchmarks.trust import faults, healthy, registry  # noqa: F401  (registers them)
from benchmarks.trust.judge import judge_all
from benchmarks.trust.page import RESULTS, write_page
from benchmarks.trust.record import record_missing
from benchmarks.trust.tables import print_lines, results_of, write_failures


def main() -> None:
    """Record, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scratch = Path(tempfile.gettempdir())
    parser.add_argument("--only", default="*", help="a glob over names of kinds or runs")
    parser.add_argument("--set", choices=["healthy", "faults", "all"], default="all", dest="which")
    parser.add_argument("--judge-only", action="store_true", help="record nothing")
    parser.add_argument("--record-only", action="store_true", help="judge nothing")
    parser.add_argument("--again", action="store_true", help="record what is recorded already, too")
    parser.add_argument("--part", choices=["tuned", "held-back", "all"], default="all")
    parser.add_argument("--shard", default="1/1", help="I/N: every N-th kind from the I-th, to record side by side")
    parser.add_argument("--jobs", type=int, default=1, help="processes that judge")
    parser.add_argument("--runs", type=Path, default=scratch / "trust" / "runs")
    parser.add_argument("--held-back-runs", type=Path, default=scratch / "trust-held")
    parser.add_argument("--failures", type=Path, help="write what went wrong in the tuned part into this file")
    parser.add_argument("--no-write", action="store_true", help="no dated result, no page")
    arguments = parser.parse_args()
    chosen = [
        case
        for case in registry.cases(arguments.which)
        if fnmatch.fnmatch(case.kind.name, arguments.only) or fnmatch.fnmatch(case.name, arguments.only)
    ]
    if arguments.part != "all":
        chosen = [case for case in chosen if case.kind.held_back == (arguments.part == "held-back")]
    if not chosen:
        sys.exit(f"trust: expected a glob that some kind or run matches; got --only={arguments.only!r}.")
    places = {"tuned": arguments.runs, "held_back": arguments.held_back_runs}
    if not arguments.judge_only:
        first, count = (int(n) for n in arguments.shard.split("/"))
        names = list(dict.fromkeys(case.kind.name for case in chosen))
        mine = set(names[first - 1 :: count])
        record_missing([case for case in chosen if case.kind.name in mine], places, again=arguments.again)
    if arguments.record_only:
        return
    verdicts = judge_all(chosen, places, arguments.jobs)
    if arguments.only != "*":
        print_lines(verdicts)
        return
    results = results_of(verdicts)
    if arguments.failures is not None:
        write_failures(arguments.failures, verdicts)
    if not arguments.no_write and arguments.which == "all" and arguments.part == "all":
        results.write("trust", RESULTS)
        write_page()


if __name__ == "__main__":
    main()
