"""Front end of the live page and the report: files, and answers to questions."""
