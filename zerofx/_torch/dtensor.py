"""DTensors: what this rank holds of one, and the same tensor made of that again."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


class DTensorLayout:
    """How one `DTensor` lies over its mesh, and which part of it this rank holds.

    Attributes:
        mesh, placements: as the `DTensor` has them.
        shape, stride: of the whole tensor.
        offsets, sizes: where this rank's part begins in the whole, and its shape.
    """

    def __init__(self, tensor: Any) -> None:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        self.mesh: DeviceMesh = tensor.device_mesh
        self.placements: tuple[Placement, ...] = tuple(tensor.placements)
        self.shape: torch.Size = tensor.shape
        self.stride: tuple[int, ...] = tensor.stride()
        sizes, offsets = compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)
        self.sizes: tuple[int, ...] = tuple(sizes)
        self.offsets: tuple[int, ...] = tuple(offsets)

    def __repr__(self) -> str:
        return f"{list(self.shape)} as {', '.join(map(str, self.placements))} over {self.mesh}"

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensorLayout:
        return self

    @property
    def is_of_boxes(self) -> bool:
        """Whether each rank's part is one rectangle of the whole: no sums, and no strided shards."""
        return all(type(placement) in (Shard, Replicate) for placement in self.placements)

    def groups(self, *, sharded: bool) -> list[Any]:
        """The process groups of the mesh's dimensions that divide the tensor; or of all of them."""
        dims = [i for i, p in enumerate(self.placements) if not sharded or isinstance(p, Shard)]
        return [self.mesh.get_group(dim) for dim in dims]

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a plain, whole tensor: a view."""
        for dim, (at, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(dim, at, size)
        return whole

    def local_of(self, tensor: Any) -> torch.Tensor:
        """This rank's part of a `DTensor` of the same shape. A collective, where that lies in another way."""
        if tensor.device_mesh != self.mesh or tuple(tensor.placements) != self.placements:
            return self.part_of(tensor.full_tensor())
        return tensor.to_local()

    def whole_of(self, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor, plain, of every rank's part. A collective."""
        return as_dtensor(local, self).full_tensor()


def as_dtensor(local: torch.Tensor, layout: DTensorLayout) -> DTensor:
    """The `DTensor` of which this rank holds ``local``; Dynamo traces it. Nothing is sent (2.11, 2.13, 2.15).

    Its gradient comes back laid out in the same way. One that is a sum over ranks, as that of a replicated weight of
    which each rank sees a part of the activations, is summed on the way.
    """
    return DTensor.from_local(
        local, layout.mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride
    )


def held(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of ``tensor``: of a `DTensor` its part (2.11, 2.13, 2.15)."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_dtensor(x: Any) -> bool:
    """Whether ``x`` is a `DTensor`."""
    return isinstance(x, DTensor)
