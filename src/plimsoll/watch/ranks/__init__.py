"""Spectra of several ranks: sent, collected, added up."""
