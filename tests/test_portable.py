"""The script that runs the tests as other machines would: what it copies, sets and says."""

import subprocess
from pathlib import Path

import pytest

from tests import portable
from tests.support.patience import wait_until


def test_the_copy_is_of_what_git_knows_or_would_add_and_runs_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    (tree / "src").mkdir(parents=True)
    (tree / ".gitignore").write_text("ignored.py\n")
    (tree / "ignored.py").touch()
    (tree / "src" / "only_here.py").write_text("print(__file__)")
    for command in (["init", "-q"], ["add", ".gitignore"]):
        subprocess.run(["git", "-C", str(tree), *command], check=True)
    (tree / "gone.py").touch()
    subprocess.run(["git", "-C", str(tree), "add", "gone.py"], check=True)
    (tree / "gone.py").unlink()
    monkeypatch.setattr(portable, "ROOT", tree)
    copy = portable.copy_tree(tmp_path / "made")
    assert copy == tmp_path / "made" / "a space" / "plimsoll"
    assert sorted(p.name for p in copy.iterdir()) == [".gitignore", ".venv", "src"]
    code = "import only_here, torch"
    said = subprocess.run([copy / ".venv/bin/python", "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == str(copy / "src" / "only_here.py")


def test_settings_reach_the_processes_and_the_home_is_empty(tmp_path: Path) -> None:
    for setting, variables in portable.SETTINGS.items():
        made = portable.environment(setting, tmp_path / "home")
        assert variables.items() <= made.items()
        assert made["HOME"] == str(tmp_path / "home") and not list((tmp_path / "home").iterdir())


def test_the_random_order_is_told_its_seed_and_only_there() -> None:
    shuffled = {setting: "--shuffle" in _line(setting) for setting in portable.SETTINGS}
    assert [setting for setting, is_shuffled in shuffled.items() if is_shuffled] == ["order"]
    assert _line("order")[_line("order").index("--shuffle") + 1] == "7"
    assert _line("load", sensitive=True)[-3:] == ["-m", "sensitive", "-x"]


def _line(setting: str, *, sensitive: bool = False) -> list[str]:
    return portable.command(setting, sensitive=sensitive, seed=7, options=["-x"])


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc")
def test_busy_processes_end_with_the_block() -> None:
    with portable.busy(2):
        wait_until(lambda: len(_spinning()) >= 2)  # one that has only just begun has no arguments yet
        mine = set(_spinning())
    assert not mine & set(_spinning())


def _spinning() -> list[int]:
    """Processes that do nothing but spin, by number."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if portable._SPIN.encode() in line:
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize(
    ("arguments", "codes", "ended"), [(["avx2", "order"], [0, 0], 0), (["avx2", "order"], [0, 3], 1)]
)
def test_one_setting_that_fails_fails_all(
    arguments: list[str],
    codes: list[int],
    ended: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    left = iter(codes)
    monkeypatch.setattr(portable, "copy_tree", lambda folder: folder)
    monkeypatch.setattr(portable.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], next(left)))
    assert portable.main(arguments) == ended
    said = capsys.readouterr().out.splitlines()[-2:]
    assert said == ["avx2: passed", f"order: {'passed' if ended == 0 else 'failed (exit code 3)'}"]


def test_an_unknown_setting_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        portable.main(["avx3"])
    assert "expected settings of generic, avx2, locale, order, no-browser, load; got avx3" in capsys.readouterr().err
