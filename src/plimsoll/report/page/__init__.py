"""Front end of the live page and the report: its files, and the answers to its questions."""
