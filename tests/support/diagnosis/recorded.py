"""Pytest plugin: runs of stories and what is found in them, for tests that only read: each is written once."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from plimsoll.diagnosis import Finding, diagnose
from tests.support.diagnosis.stories import Story

ONE_WORKER = pytest.mark.xdist_group("recorded stories")  # files that share most of their stories


class Recorded:
    """The run of a story."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @functools.cached_property
    def found(self) -> list[Finding]:
        """What all rules find."""
        return diagnose(self.path)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Story], Recorded]:
    """The run of a story, written when it is first asked for; nobody may change it."""
    folder = tmp_path_factory.mktemp("stories")
    runs: dict[int, tuple[Story, Recorded]] = {}  # the story too, or another could get its number

    def run_of(story: Story) -> Recorded:
        if id(story) not in runs:
            runs[id(story)] = story, Recorded(story.write(folder / f"{len(runs)}" / "run"))
        return runs[id(story)][1]

    return run_of
