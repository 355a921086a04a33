"""The boundary of a step, and the facts that are recorded at each."""
