"""`fold` turns a unit-scaled model into a plain one."""
