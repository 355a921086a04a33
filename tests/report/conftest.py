"""The browser's fixtures, for the tests of pages in this folder."""

from tests.support.browser import browser as browser, opened as opened, page as page, seen as seen
from tests.support.report.served import runs_folder as runs_folder, site as site
