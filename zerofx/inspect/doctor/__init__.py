"""Doctor: what this machine has for zerofx, and whether it works. ``python -m zerofx doctor``.

::

    ok     python      3.11.7
    ok     torch       2.13.0+cpu
    none   gpu         torch is built for the CPU
                       to train on a GPU: pip install torch, in its CUDA build
    ok     generated   Inductor's code for the CPU runs, after 9.1 s
    FAILS  ranks       gloo, 2 ranks: rank 1: RuntimeError: Gloo connectFullMesh failed
                       set GLOO_SOCKET_IFNAME to the network interface that ranks reach each other by: lo on one machine

========  ==========================================================
examine   all of it: looks and trials, a line each, in under a minute
looks     what can be seen without trying
trials    what has to be tried, in processes of its own
========  ==========================================================

It goes on after a failure: what fails, hangs or is not there is a line, with what to do about it.
"""
