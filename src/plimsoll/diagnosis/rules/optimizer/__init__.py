"""Rules of optimizers, their state and their schedules."""
