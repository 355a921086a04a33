"""Output of subcommands that takes more than a few lines."""
