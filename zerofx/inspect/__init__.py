"""Inspect: what can be read, and foretold, of a model and its graphs.

===============  ===============================================================
memory           what a rank holds now
report           everything about one model, as a page
report_timeline  that page's time line
predict/         time and memory, foretold
choose/          what options to train it with
doctor/          what this machine has, and whether it works
===============  ===============================================================

Imports every package; only the package itself and the command line import it.
"""
