"""What subcommands print that takes more than a few lines."""
