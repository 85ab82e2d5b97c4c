"""Every private PyTorch interface that zerofx uses, and the versions each was seen in.

When a new PyTorch breaks something, this is the folder to mend; nothing else imports a private module.

===================  ==================================================================
file                 what it asks
===================  ==================================================================
dynamo               how frames become graphs; of which code, from which inputs
aot                  forward apart from backward; what each input and output of them is
partition            what forward saves, and what backward recomputes
symbols              sizes that are symbols: which there are, and what each counts as
higher_order         operators whose arguments are graphs
inductor             code for a graph, in the order that the passes decided
code_cache           the folder of that code, and what was cut off there
artifacts            what these caches got from this process, to be packed
code_locks           which of the processes that share this folder generates a graph's code
warm                 AOTAutograd's cache of graphs that were compiled
autograd             the engine, while a backward pass runs and before
profiler             what is allocated, and whether somebody profiles
tensors              tensors, the memory behind them, and who gets to see them
optimizers           an optimizer's step, and its hooks
distributed          process groups, their backends, and what waits in them
dtensor              DTensors, and this rank's parts of them
checkpoint           the files of torch.distributed.checkpoint
pretended_cuda       a CUDA device that is not there, while code is written for it
pretended_attention  which kernel for attention would run on it
python_engine        the autograd engine, for tensors on it
triton_kernels       machine code for the kernels that Inductor writes
===================  ==================================================================

The rest of zerofx imports from here, not from the files.
"""

from zerofx._torch.aot import (
    compile_context,
    compile_with_aot_autograd,
    donate_nothing,
    donated_inputs,
    fake_mode_of,
    forget_output_strides,
    functorch_config,
    gradient_outputs,
    input_index,
    inputs_written_behind,
    is_tangent,
    lazy_module,
    must_recompute,
    must_save,
    runs_again,
    saved_outputs,
    saving_is_decided,
    tangents,
    written_behind,
)
from zerofx._torch.artifacts import artifacts_are_new, code_folder, libraries
from zerofx._torch.autograd import (
    backward_number,
    end_of_backward,
    gradient_edge,
    inside_backward,
    keeps_graph,
    node_behind,
    post_accumulate_hooks,
    run_post_accumulate_hooks,
    saved_tensors_are_hooked,
    take_hooks,
    will_accumulate,
)
from zerofx._torch.checkpoint import (
    DCP_VERSION,
    EXTRA_STATE,
    StorageInfo,
    index_class,
)
from zerofx._torch.code_locks import Claimed, unclaimed
from zerofx._torch.distributed import (
    FSDP_MARKS,
    SAME_HOST_ERROR,
    PretendedGroup,
    PythonWork,
    abort_collectives,
    around_forward,
    backend_name,
    default_store,
    gather_into,
    has_backend,
    is_communication_error,
    is_on_its_way,
    register_work,
    resolve_process_group,
    timeout_of,
)
from zerofx._torch.dtensor import DTensorLayout, as_dtensor, held, is_dtensor
from zerofx._torch.dynamo import (
    FromDynamo,
    NotOneGraph,
    ask_as_torch_does,
    call_instead,
    chosen_by_data,
    compile_inside_of,
    compile_module,
    compiles_now,
    frame_locals_and_globals,
    inlined_alone,
    look_at_hooks,
    look_at_parameters,
    oldest_version_first,
    run_while_tracing,
    skip_call,
    skip_calls,
    skippable_code,
    source_name,
    static_shape,
    trace_gradients,
    traced_for,
    uncompiled,
    watch_examples,
    with_own_code,
)
from zerofx._torch.higher_order import (
    computes_anew,
    followed,
    is_region,
)
from zerofx._torch.inductor import (
    SEEDS,
    box,
    boxed,
    compile_with_inductor,
    generate_code,
    generate_region,
    inductor_config,
    pin_order,
    pinned,
    source_code,
    taken_apart,
    write_code,
)
from zerofx._torch.optimizers import step_of, steps_running
from zerofx._torch.partition import LEAST, Cut, Partition, cutting, partitioning, saving, saving_as, without_code
from zerofx._torch.pretended_cuda import ARCHITECTURES, PretendedDevice, pretended_cuda
from zerofx._torch.profiler import allocations, memory_profile, profiler_is_on
from zerofx._torch.symbols import hold_up_to_counted, know_bounds, symbols_of, without_symbols
from zerofx._torch.tensors import (
    DisableTorchFunction,
    OpOverload,
    StorageWeakRef,
    TorchDispatchMode,
    UnwrapTensorSubclass,
    adapt_arguments,
    around_copies,
    before_conversions,
    call_plainly,
    fake_mode,
    initialise_by,
    is_wrapped,
    is_wrapper_subclass,
    outside_of_transforms,
    put_tensor,
    pytree,
    storage_of,
    watch_arguments,
    with_numbers,
    with_own_storage,
)
from zerofx._torch.triton_kernels import KernelText, MachineCode, kernel_texts, machine_code
from zerofx._torch.warm import autograd_cache, autograd_cache_is_on, cacheable, copy_captured, entry
