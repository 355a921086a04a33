"""Operations of a training step at the dispatcher: sites, schemas, names, state."""
