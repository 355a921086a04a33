"""The browser's fixtures, for the tests of pages in this folder."""

from tests.browser import browser as browser, opened as opened, page as page, seen as seen
from tests.report.served import runs_folder as runs_folder, site as site
