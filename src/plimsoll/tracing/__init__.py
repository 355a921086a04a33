"""The operations of a training step as the dispatcher sees them: call sites, schemas, names, and state to restore."""
