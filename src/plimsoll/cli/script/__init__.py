"""Running a user's script under a watch."""
