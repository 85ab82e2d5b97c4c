"""Weights, gradients, activations and optimizer state in host memory or in a file (``offload=``).

======================  ==================================================================================
operators               what starts a transfer, and what waits for it
reload_weights          pass: shards come to the device ahead of their gather
offload_gradients       pass: gradients leave the device as soon as they are reduced
offload_activations     pass: what forward saves leaves the device, and comes back in backward
proof                   what `verify` knows of them;
proof_of_activations    of these alone
carriage                what a run of a graph moves to the device and away from it
activation_store        what forward saves, in a file
activations_on_host     the same in the host's memory, of a model on a GPU
place                   where a module's state is to be
elsewhere               what the two homes have in common
in_file                 a home: what is in a file
on_host                 a home: state in the host's memory, of a model on a GPU
started                 a copy between a device and the host that was started
facts                   what is known of a graph, and what its forward leaves for its backward
simulated               what a simulated step has to know
away                    what a budget for activations may send away
feature                 what is added to the core
======================  ==================================================================================
"""
