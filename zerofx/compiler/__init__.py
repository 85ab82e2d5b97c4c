"""Compiler: from a module to graphs that run.

============  ==================================================================
api           the calls that a user makes
options       their options, checked
auto          options that are left open, and who chooses them
checks        what is checked before a module is sharded
apart         DTensors on other dimensions: this rank's part of each is what is sharded
subclasses    frozen tensor subclasses: the tensors inside of them are what is sharded
shard         a module is sharded, group by group
copies        deep copies of it are sharded alike
initialize    values for modules of the meta device
wrappers      wrappers that would train the module in parallel once more
backend       the ``torch.compile`` backend
captured      what is done with Dynamo's graph
regions       what `nested_compile_region` marks, put where it is called
written       graphs that write to weights write to copies
activations   what forward saves, within a budget
compared      what tensor-parallel ranks have alike: the interface that a feature fills in
division      one budget, divided between weights and activations
trial         one division, tried on copies
branches      of which parameters this rank, or another, has a gradient
choices       what a budget decided, to be read
unit          what compiles one graph starts from: options, and which inputs are parameters
pair          what the forward and the backward of one graph share; contexts
cut           what forward saves, as AOTAutograd cuts a graph in two
compilers     one graph of a pair: passes, executor, and what runs it
regional      the executor that compiles equal regions of a graph once
lowered       what is left of a graph when it is compiled: its code, and what binds that to groups
warm          a warm start: what an earlier process compiled, from a cache
artifacts     what a start compiled, in a folder for other hosts
rewriting     one graph on its way through the passes
runners       what runs at every step
shadow        what ranks do that do not run a graph
lean          what Python adds to a compile, and need not
records       what was compiled, to be read
explain       why a node stands where it stands
printing      a graph in a line per collective
listing       a graph in a line per node
observed      graphs under names, in logs and traces
progress      what rank 0 says while graphs are compiled
============  ==================================================================

Imports every package but `zerofx.inspect`::

    runtime, checkpoint ◀── options ◀── apart, checks ◀── shard ◀── captured ◀── backend ◀── api
        passes ◀── rewriting ◀── records ◀── unit, pair ◀── cut, compilers ◀────┘
"""
