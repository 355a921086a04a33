"""Parity: whether one recipe trains as well as another, within a tolerance that is declared beforehand."""
