"""Blind mutants of finished graphs, and ranks in one process to run them on.

==============  ========================================================
lockstep.py     runs a graph on all ranks, node by node
training.py     takes a training step so, and tells what came of it
mutations.py    changes a graph by chance
survey.py       verifies mutants, and runs those that are accepted
==============  ========================================================
"""
