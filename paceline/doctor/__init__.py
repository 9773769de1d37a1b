"""Checks of an installation for `paceline doctor`: software, machine and model files, each with a remedy.

A machine may lack any part that is checked, torch included, so modules import nothing of that kind at the top.
"""
