"""Run the tests as other machines would: ``python tests/portable.py [SETTING ...] [--sensitive] [-- PYTEST OPTIONS]``.

Each setting runs in a copy of the working tree, in a folder named `plimsoll` whose parent has a space in its name. The
copy has an environment of its own, with the packages of the one that runs this.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Generator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS: dict[str, dict[str, str]] = {
    "generic": {"NUMBA_CPU_NAME": "generic", "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"},
    "locale": {"LANG": "C", "LC_ALL": "C", "TZ": "Asia/Kolkata"},
    "order": {},
    "no-browser": {"CHROMIUM": "none"},
    "load": {},
}
BUSY = 8
_SPIN = "while True: pass"


def copy_tree(folder: Path) -> Path:
    """Copies what git knows or would add, and makes an environment for it; returns the copy."""
    copy = folder / "a space" / "plimsoll"
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, check=True, capture_output=True).stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    venv.create(copy / ".venv", symlinks=True)
    packages = next((copy / ".venv").glob("lib/python*/site-packages"))
    paths = [
        str(copy / "src"),
        str(copy / "lab" / "src"),
        *(path for path in sys.path if path.endswith("site-packages")),
    ]
    (packages / "here.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
    return copy


@contextlib.contextmanager
def busy(count: int) -> Generator[None]:
    """So many processes that never wait, until the end of the block."""
    started = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def environment(setting: str, home: Path) -> dict[str, str]:
    """The variables of a setting; the home folder is empty."""
    home.mkdir(exist_ok=True)
    return {**os.environ, "HOME": str(home), "USER": "somebody", **SETTINGS[setting]}


def command(setting: str, *, sensitive: bool, seed: int, options: list[str]) -> list[str]:
    """The pytest command line of a setting."""
    own = ["--shuffle", str(seed)] if setting == "order" else []
    marked = ["-m", "sensitive"] if sensitive else []
    workers = ["-n", "auto", "--maxprocesses", "4", "--dist", "loadgroup"]
    return ["-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, *marked, *own, *options]


def main(arguments: list[str]) -> int:
    """Runs the settings, one after another; 1 if the tests of one failed."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    own, options = arguments[:place], arguments[place + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=f"of {', '.join(SETTINGS)}; default all")
    parser.add_argument("--sensitive", action="store_true", help="only tests that are sensitive to such settings")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000, help="of the random order")
    chosen = parser.parse_args(own)
    if unknown := sorted(set(chosen.settings) - SETTINGS.keys()):
        parser.error(f"expected settings of {', '.join(SETTINGS)}; got {', '.join(unknown)}")
    codes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as made:
        copy = copy_tree(Path(made))
        for setting in chosen.settings or SETTINGS:
            line = command(setting, sensitive=chosen.sensitive, seed=chosen.seed, options=options)
            variables = " ".join(f"{name}={value}" for name, value in SETTINGS[setting].items())
            print(f"== {setting}: {variables} python {' '.join(line)}", flush=True)
            with busy(BUSY if setting == "load" else 0):
                finished = environment(setting, Path(made) / "home")
                python = copy / ".venv/bin/python"
                codes[setting] = subprocess.run([python, *line], cwd=copy, env=finished, check=False).returncode
    for setting, code in codes.items():
        print(f"{setting}: {'passed' if code == 0 else f'failed (exit code {code})'}")
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
