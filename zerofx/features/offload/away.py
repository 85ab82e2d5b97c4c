"""Activations that an `activation_budget`, or ``memory=``, may send away instead of computing them again."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from zerofx.compiler.activations import Away
from zerofx.features.offload.facts import ActivationChoice
from zerofx.features.offload.offload_activations import leaving
from zerofx.runtime.state.group import Family
from zerofx.simulate.clock import Rates, ordinary


def away(family: Family, rates: Rates | None) -> Away | None:
    """See `zerofx.features.interface.Feature`."""
    store, offload = family.activation_store, family.offload
    if store is None or offload is None:
        return None
    rates = rates or offload.rates
    if store.file is None:
        rates = rates or ordinary("cuda")
        rates = replace(rates, disk_bytes_per_s=rates.of_host())
    return Away(partial(leaving, choice=ActivationChoice(store.smallest)), rates)
