"""The scripts here are run by tests, and never collected: some of them train as soon as they are imported."""

collect_ignore_glob = ["*.py"]
