"""`fold`: a unit-scaled model as a plain one."""
