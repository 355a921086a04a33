"""A small one-stage detector on made scenes, for the experiments that train one."""
