"""Optional packages by the extra of pyproject.toml, and their install line.

Plimsoll is installed from a checkout, so `pip install 'plimsoll[serve]'` would find nothing. The packages themselves
are on an index: their names are an install line that works in any folder.
"""

# The extras that a user may want, with what they hold; a test compares them with pyproject.toml.
EXTRAS: dict[str, tuple[str, ...]] = {
    "report": ("plotly>=6.0",),
    "serve": ("plotly>=6.0", "fastapi>=0.110", "uvicorn>=0.29"),
    "tensorboard": ("tensorboard>=2.16",),
    "wandb": ("wandb>=0.20",),
    "mlflow": ("mlflow-skinny>=3.0", "alembic>=1.10", "sqlalchemy>=2.0"),
    "lightning": ("lightning>=2.3",),
    "transformers": ("transformers[torch]>=4.44",),
    "sql": ("duckdb>=1.0",),
    "pandas": ("pandas>=2.0",),
    "mcp": ("mcp>=2.0",),
}


def install_line(extra: str) -> str:
    """Return the shell command that installs an extra's packages, for pasting.

    >>> install_line("report")
    "pip install 'plotly>=6.0'"
    """
    return " ".join(["pip install", *(f"'{requirement}'" for requirement in EXTRAS[extra])])
