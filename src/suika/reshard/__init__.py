"""Moves sharded state between layouts, device to device. Knows tensors, not jobs.

For a training job: `JobShape`, `assign`, `plan_move`, `predict_move`. For anything else made of named sharded tensors:
`TensorSpec`, `plan_reshard`, `dtensor_boxes`. Both give a `MovePlan`, which `reshard` carries out over a transport
(`Gloo`, `Hub`). Names are imported when first used: planning needs no torch.
"""

from importlib import import_module

_HOME = {
    "Box": "regions",
    "JobShape": "state",
    "assign": "assignment",
    "choose_devices": "assignment",
    "MovePlan": "moveplan",
    "plan_move": "moveplan",
    "predict_move": "predict",
    "TensorSpec": "tensors",
    "plan_reshard": "tensors",
    "dtensor_boxes": "tensors",
    "reshard": "execute",
    "MoveError": "execute",
    "MoveReport": "report",
    "Gloo": "transports.gloo",
    "Hub": "transports.inprocess",
    "Transport": "transports.base",
    "TransportError": "transports.base",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
