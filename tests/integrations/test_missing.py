"""A trainer that is not installed is named with its install line; the package itself needs none."""

from tests.support import processes
from tests.support.cases import each

_SCRIPT = """
import sys
sys.modules[{package!r}] = None
import plimsoll.integrations
try:
    import plimsoll.integrations.{module}
except plimsoll.MissingExtraError as error:
    print(error)
assert {module!r} not in dir(plimsoll.integrations)  # `help` loads all of that
try:
    plimsoll.integrations.{module}  # is loaded on first use
except plimsoll.MissingExtraError as error:
    print(error)
"""


@each(
    ("module", "package", "line"),
    [
        ("lightning", "lightning.pytorch", "pip install 'lightning>=2.3'\n"),
        ("transformers", "transformers", "pip install 'transformers[torch]>=4.44'\n"),
        ("accelerate", "accelerate", "pip install accelerate\n"),
    ],
)
def test_a_missing_trainer_is_named(module: str, package: str, line: str) -> None:
    script = _SCRIPT.format(module=module, package=package)
    done = processes.python("-c", script)
    assert done.returncode == 0 and done.stdout.count(line) == 2, done.stderr
