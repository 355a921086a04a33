"""The browser's fixtures, for the tests of pages in this folder."""

from tests.browser import browser as browser, opened as opened, page as page, seen as seen
