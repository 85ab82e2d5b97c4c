"""Random models, options and training loops give the numbers of one process.

A hundred small cases that hypothesis draws, the same in every run; ``make fuzz`` draws new ones, larger, on up to
four ranks. What fuzzing found once is below, cut down and by name.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz import recipe as vocabulary
from tests.fuzz.case import fails
from tests.fuzz.recipe import CALLS, CONTAINERS, LEAVES, Layer, Recipe, kinds
from tests.fuzz.strategies import recipes
from tests.slow import slow_if

LINEAR = Layer("linear", width=4)
CUSTOM = Layer("custom", width=6, frozen=True)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("cases", "executor", "seed"),
    [
        *((15, "eager", 1), (8, "inductor", 3)),  # beside those that were found
        pytest.param(50, "eager", 2, marks=pytest.mark.slow),
    ],
)
def test_random_cases_give_the_numbers_of_one_process(make_workers, cases: int, executor: str, seed: int) -> None:
    @hypothesis.seed(seed)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(recipe=recipes(executor, largest_world=2, size=2))
    def check(recipe: Recipe) -> None:
        problem = fails(make_workers, recipe)
        assert not problem, f"seed {seed}: {problem}"

    check()


def inside(container: str, *kinds: str) -> tuple[Layer, ...]:
    return (LINEAR, Layer(container, children=tuple(Layer(kind, width=4) for kind in kinds)), LINEAR)


FOUND = {
    # Dynamo made symbols of the sizes of parameters, where a graph break inside of layers compiles each by itself.
    "layers_of_different_sizes_that_share_code": Recipe((LINEAR, Layer("gru", width=6), Layer("linear", width=3))),
    # AOTAutograd drops the descriptors of outputs when it saves the state of a random number generator.
    "attention_that_is_checkpointed": Recipe(inside("checkpoint", "attention")),
    # A write to a buffer that a checkpointed layer saves, done after the forward, was taken for one before backward.
    "batch_normalisation_that_is_checkpointed": Recipe(inside("checkpoint", "batch_norm")),
    # Its backward read running statistics, which the next forward, or the next call behind a graph break, writes.
    "batch_normalisation_that_is_checkpointed_and_called_again": Recipe(
        (*inside("reentrant", "batch_norm"), Layer("break"), Layer("checkpoint", children=(Layer("again", of=1),))),
        steps=(("plain", "two_forwards"), ("crossed",)),
    ),
    # Of two versions that both fit, Dynamo took the one that ran last: another one on the rank with other rows.
    "a_rank_that_compiles_anew_alone_where_a_layer_breaks": Recipe(
        (
            Layer("residual", children=(Layer("empty", frozen=True), Layer("stash", frozen=True), Layer("stop"))),
            Layer("residual", children=(Layer("eager", children=(Layer("break"),)),)),
        ),
        steps=(("eval", "plain"), ("uneven",)),
    ),
    # Inductor knew by their places what backward may write over, and zerofx had taken parameters out before these: it
    # wrote over a tangent that the layer in front had still to read.
    "a_backward_that_writes_over_its_inputs": Recipe(
        (
            Layer("branch", children=(Layer("break"),)),
            Layer("embedding"),
            Layer("residual", children=(Layer("batch_norm", width=6),)),
        ),
        steps=(("longer",),),
        world=1,
        executor="inductor",
        seed=2,
    ),
    # Arithmetic on slices, without gradients, gave what was gathered of it in the masters' dtype.
    "weight_arithmetic_without_gradients_in_mixed_precision": Recipe(
        inside("reentrant", "scale", "break", "linear"), precision="low", steps=(("plain", "eval"),)
    ),
    # Stage 0, mixed precision: code outside of any graph computed with masters and was refused.
    "eager_layers_of_stage_0_in_mixed_precision": Recipe(inside("eager", "linear", "tied"), precision="low", stage=0),
    # A view of a weight, and a weight that `vmap` maps over, are not asked in which dtype they compute.
    "views_of_weights_outside_of_any_graph_of_stage_0_in_mixed_precision": Recipe(
        inside("eager", "function", "linear", "transposed", "positions", "vmap"),
        precision="low",
        stage=0,
        steps=(("plain", "eval"), ("crossed",)),
    ),
    # A complex view of one met frequencies of the computing dtype as it was: the sum was in the masters' dtype.
    "a_complex_view_of_a_weight_outside_of_any_graph_of_stage_0_in_mixed_precision": Recipe(
        (LINEAR, *inside("eager", "complex"), Layer("norm")), precision="low", stage=0
    ),
    "weights_that_are_mapped_over_in_mixed_precision": Recipe(
        (LINEAR, Layer("vmap", of=1)), precision="low", steps=(("plain", "eval"),)
    ),
    "weights_that_are_mapped_over_outside_of_any_graph_of_stage_0_in_mixed_precision": Recipe(
        (LINEAR, Layer("eager", children=(Layer("vmap", of=1),))), precision="low", stage=0
    ),
    # `vmap` over what meets a weight: PyTorch refused the gather, and named no parameter.
    **{
        f"a_weight_that_rows_are_mapped_over_outside_of_any_graph_in_stage_{stage}": Recipe(
            inside("eager", "vmap"), steps=(("plain", "eval"), ("keep", "crossed")), stage=stage
        )
        for stage in (1, 3)
    },
    # A torch.autograd.Function outside of any graph is handed a parameter without __torch_function__: its gradient
    # went to .grad whole, as each rank had it.
    **{
        f"autograd_function_outside_of_any_graph_in_stage_{stage}": Recipe(
            inside("eager", "custom", "stash"), steps=(("plain", "keep", "plain"), ("crossed",)), stage=stage
        )
        for stage in (0, 2, 3)
    },
    # A checkpoint's hooks hand back what is saved without its class: memory that is not there was read.
    **{
        f"autograd_function_in_a_checkpoint_outside_of_any_graph_in_stage_{stage}": Recipe(
            (LINEAR, Layer("eager", children=inside("checkpoint", "custom", "stash"))),
            steps=(("plain", "keep", "plain"), ("crossed",)),
            stage=stage,
        )
        for stage in (2, 3)
    },
    # The hooks that see to gradients outside of any graph were not there for what was frozen when it was sharded.
    **{
        f"parameters_trained_later_in_stage_{stage}": Recipe(
            (LINEAR, Layer("eager", children=(Layer("custom", frozen=True), Layer("linear", frozen=True)))),
            steps=(("plain",),) * 3,
            stage=stage,
            thaw=True,
        )
        for stage in (0, 3)
    },
    # Weights without elements lie at one place: the verifier took one for the other.
    "empty_weights_of_one_shape": Recipe(
        (LINEAR, Layer("sequence", children=(Layer("empty"), Layer("empty"))), LINEAR)
    ),
    # Stage 0: Dynamo compiled the __torch_function__ of a weight, and answered one getter with another: its shape was
    # taken for the weight.
    "a_weight_of_stage_0_where_graphs_break": Recipe(
        tuple(Layer(kind, width=6, of=1) for kind in ("linear", "tied", "transposed", "peek", "sometimes")),
        steps=(("plain", "sometimes"), ("plain",)),
        world=1,
        stage=0,
    ),
    # Dynamo compiled the __torch_function__ of a view of a gathered weight, and went round in it.
    "a_view_of_a_weight_where_a_graph_breaks_in_evaluation": Recipe(
        (
            Layer("branch", children=(Layer("peek", width=2), Layer("checkpoint", children=(CUSTOM,)), Layer("break"))),
            Layer("residual", children=(Layer("empty", width=9, bias=False),)),
            Layer("positions", width=6, frozen=True, of=3),
            Layer("sequence", children=(Layer("branch", children=(Layer("stash", width=8, frozen=True),)),)),
        ),
        steps=(("plain",), ("eval",)),
        grouping="linear",
        budget="some",
        optimizer="before",
        output="dict",
        zero=False,
        seed=4,
    ),
    # `verify` refused a table whose rows are picked ahead of the layers, where the step's gathers were still under way.
    "a_table_whose_replicas_are_still_to_come": Recipe(
        (LINEAR, Layer("embedding", width=7, bias=False)),
        world=4,
        rows=2,
        scheme="between",
        grouping="each",
        lookups=True,
    ),
    # A gradient that was kept outside of graphs came in another dtype than the graph was compiled for.
    "a_weight_in_and_outside_of_graphs_in_low_precision_without_synchronisation": Recipe(
        (Layer("eager", children=(Layer("strided", width=7),)), Layer("transposed", width=7, bias=False)),
        steps=(("keep",),),
        executor="inductor",
        precision="low",
    ),
    # Stage 0: a graph that reads a group without gradients made zeros for all of it, and there was nothing beside them.
    "a_group_of_stage_0_of_which_a_graph_has_no_gradient": Recipe(
        (Layer("no_grad", children=(Layer("weight_norm", width=2),)), LINEAR), stage=0
    ),
    # The graph stepped a group whose other weight a custom function's backward, outside of graphs, had still to read.
    "a_step_in_backward_of_a_group_that_an_autograd_function_reads": Recipe(
        (Layer("unused"), Layer("branch", children=(Layer("break"), Layer("stash"), Layer("complex")))),
        grouping="linear",
        inside=True,
    ),
    # Inductor deleted a branch's operands where the other was taken not, gave them other strides than it was compiled
    # for, and `check_code` took the lines of branches for earlier than those in front of them.
    "branches_of_cond_whose_weights_go_behind_them": Recipe(
        (LINEAR, Layer("vmap", width=6, of=1), Layer("cond", width=6, of=1), LINEAR), executor="inductor"
    ),
    # Inductor wrote a gradient over another that was still being sent, in place.
    "rows_that_are_sent_while_a_layer_before_them_is_computed": Recipe(
        (LINEAR, Layer("embedding", width=7, bias=False)), executor="inductor", grouping="each", lookups=True
    ),
}


LONG = ("branches_of_cond_whose_weights_go_behind_them", "rows_that_are_sent_while_a_layer_before_them_is_computed")


@slow_if(lambda name: name in LONG)
@pytest.mark.parametrize("name", FOUND)
def test_what_fuzzing_found(make_workers, name: str) -> None:
    problem = fails(make_workers, FOUND[name])
    assert not problem, problem


def check_breaks_are_noticed() -> str:
    """On each rank: a case whose sharded run is fed other rows than the single process."""
    from tests.fuzz import case

    draw = case.inputs
    sharded = case.sharded

    def disturbed(recipe: Recipe, *args: Any) -> case.Values:
        case.inputs = lambda recipe, step, call, rank: draw(recipe, step + 1, call, rank)
        try:
            return sharded(recipe, *args)
        finally:
            case.inputs = draw

    case.sharded = disturbed
    try:
        return case.check(Recipe((LINEAR,)))
    finally:
        case.sharded = sharded


def test_a_run_on_other_data_is_told_apart(workers2) -> None:
    for rank, found in enumerate(workers2.run(check_breaks_are_noticed)):
        for what in ("loss 0.0.0", "gradient 0 of head.weight", "parameter layers.0.inner.weight"):
            assert f"rank {rank}: {what}" in found


def test_a_recipe_prints_as_what_makes_it() -> None:
    recipe = Recipe((Layer("residual", children=(Layer("linear", width=3, bias=False), Layer("break"))),), stage=1)
    assert eval(repr(recipe), vars(vocabulary)) == recipe
    assert dataclasses.replace(recipe, stage=3) != recipe and kinds(recipe.layers) == {"residual", "linear", "break"}
    assert not {*CONTAINERS} & {*LEAVES} and "plain" in CALLS
