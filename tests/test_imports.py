"""What importing loads, and what it must not."""

import subprocess
import sys

import pytest

_HEAVY = {"torch", "numba", "triton", "pyarrow", "scipy", "typer", "rich", "plotly", "fastapi"}


def loaded_by(code: str) -> set[str]:
    """The heavy packages that a fresh interpreter has loaded after `code`."""
    probe = f"import sys\n{code}\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return _HEAVY & set(result.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import plimsoll",
        "import plimsoll; plimsoll.formats.get('e4m3').max; plimsoll.FormatError; dir(plimsoll)",
        "from plimsoll.formats import Plan",
        "from plimsoll import Format, BlockFormat",
    ],
)
def test_formats_need_no_heavy_package(code: str) -> None:
    assert loaded_by(code) == set()


def test_the_probe_sees_what_is_loaded() -> None:
    assert "rich" in loaded_by("import rich")


def test_casting_and_measuring_load_neither_triton_nor_the_command_line() -> None:
    loaded = loaded_by("import plimsoll; plimsoll.cast, plimsoll.measure")
    assert "torch" in loaded
    assert not loaded & {"triton", "typer", "rich", "plotly", "fastapi"}


def test_judging_a_recorded_run_loads_nothing_of_live_training() -> None:
    probe = (
        "import sys, plimsoll; plimsoll.diagnose, plimsoll.whatif, plimsoll.plan, plimsoll.diff; print(*sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert not {"plimsoll.watch", "plimsoll.precision", "torch._dynamo"} & set(result.stdout.split())


def test_names_of_live_training_come_when_asked_for() -> None:
    from plimsoll import diagnosis

    assert {"Guard", "locate", "Limits", "locate_on_trigger"} <= set(dir(diagnosis))
    assert diagnosis.Guard.__name__ == "Guard" and callable(diagnosis.locate)
    with pytest.raises(AttributeError, match="module 'plimsoll.diagnosis' has no attribute 'guards'"):
        getattr(diagnosis, "guards")  # noqa: B009  (a name that type checkers know is not there)
