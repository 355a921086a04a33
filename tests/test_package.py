"""The built package: whole, typed, of one version, and complete enough to be built again from its sources."""

import email
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import plimsoll

ROOT = Path(__file__).parents[1]
EXTRAS = {"report", "serve", "tensorboard", "wandb", "mlflow", "lightning", "transformers", "sql", "pandas", "mcp"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def packaged(folder: Path) -> set[str]:
    """The files of the package in a checkout, as their names in the wheel."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder.parent)) for path in files}


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == packaged(ROOT / "src" / "plimsoll")
    assert "plimsoll/py.typed" in held


def test_experiments_are_in_a_wheel_of_their_own(tmp_path: Path, wheel: zipfile.ZipFile) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT / "lab", check=True)
    (path,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(path).namelist() if ".dist-info/" not in name}
    assert names == packaged(ROOT / "lab" / "src" / "plimsoll_lab")
    assert {"plimsoll_lab/py.typed", "plimsoll_lab/recorded.json"} <= names
    assert not [name for name in wheel.namelist() if "experiment" in name]
    version = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert version == plimsoll.__version__


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    said = email.message_from_bytes(wheel.read(name))
    assert (said["Name"], said["Version"]) == ("plimsoll", plimsoll.__version__)
    assert said["License-Expression"] == "Apache-2.0" and said.get_all("License-File") == ["LICENSE"]
    assert EXTRAS | {"all", "bench", "dev"} == set(said.get_all("Provides-Extra", []))
    core = {re.split(r"[<>=;\s]", need)[0] for need in said.get_all("Requires-Dist", []) if "extra ==" not in need}
    assert core == {"torch", "numpy", "pyarrow", "networkx", "scipy", "typer", "rich", "numba"}
    entry = wheel.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert "plimsoll = plimsoll.cli:main" in entry


def test_the_sources_are_enough_to_build_and_test_again(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {f"src/{name}" for name in packaged(ROOT / "src" / "plimsoll")} <= held
    needed = {"pyproject.toml", "Makefile", "constraints.txt", "conftest.py", "mkdocs.yml", "README.md", "LICENSE"}
    needed |= {"CHANGELOG.md", "CITATION.cff", "SECURITY.md", "CONTRIBUTING.md", ".ci/run", "tests/test_package.py"}
    assert needed <= held
    assert not {name for name in held if "__pycache__" in name or name.startswith((".venv", "site/", "demo/", "dist/"))}


def test_all_is_every_extra_and_the_version_stands_in_one_place() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert extras["all"] == [f"plimsoll[{','.join(name for name in extras if name not in ('all', 'bench', 'dev'))}]"]
    assert set(extras) - {"all", "bench", "dev"} == EXTRAS
    assert f"version: {plimsoll.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## [{plimsoll.__version__}] - " in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_every_package_of_the_development_environment_is_pinned() -> None:
    pinned = re.findall(r"^([A-Za-z0-9_.-]+)==", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    names = {re.sub(r"[-_.]+", "-", name).lower() for name in pinned}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(need for needs in project["optional-dependencies"].values() for need in needs),
    ]
    asked = {re.sub(r"[-_.]+", "-", re.split(r"[<>=;\[\s]", need)[0]).lower() for need in wanted}
    assert asked - {"plimsoll"} <= names


def test_no_file_names_a_package_registry() -> None:
    """Links lead to a project's source; registries are reached by their clients alone."""
    hosts = ["pypi" + ".org", "python" + "hosted.org", "npm" + "js.com", "anaconda" + ".org", "crates" + ".io"]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file():
            text = path.read_bytes()
            assert not [host for host in hosts if host.encode() in text], name
