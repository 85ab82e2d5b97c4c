"""Groups are updated inside of backward, each as soon as its gradient is there (`zerofx.step_in_backward`).

=========  ============================================
step       the pass
proof      what `verify` knows of updates
feature    what is added to the core
=========  ============================================
"""
