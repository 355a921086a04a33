"""Reports in one file: HTML, Markdown, and in notebooks."""
