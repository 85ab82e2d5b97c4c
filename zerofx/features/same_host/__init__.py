"""Ranks of one host read each other's memory.

===========  =========================
same_host    the shortcut
feature      what is added to the core
===========  =========================
"""
