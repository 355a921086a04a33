"""Tables and progress bars of `plimsoll lab` in the terminal."""
