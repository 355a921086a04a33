"""What a guard can do, one kind of action each."""
