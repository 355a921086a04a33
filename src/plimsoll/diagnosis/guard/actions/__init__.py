"""The actions of a guard: on the whole run, and on its scales and modules."""
