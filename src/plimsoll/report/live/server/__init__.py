"""The web server of the live page."""
