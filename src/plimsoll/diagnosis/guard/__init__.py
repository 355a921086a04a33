"""`Guard`: acts on findings while a training runs."""
