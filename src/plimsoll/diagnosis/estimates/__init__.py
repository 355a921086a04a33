"""What a format, a scale or rounding does to recorded values, for whole collections at once."""
