"""The actions of a guard, one kind in each module."""
