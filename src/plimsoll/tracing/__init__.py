"""Operations of a training step at torch's dispatcher: call sites, schemas, names."""
