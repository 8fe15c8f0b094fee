"""Tensors in memory that other processes of this host can map: one anonymous file per buffer (Linux memfd).

They are plain CPU tensors; training and the optimizer use them in place. Nothing has a name, so nothing can be left
behind: the kernel frees a buffer when the last process that maps it lets go. Handing a buffer to another process is
therefore handing over its descriptor, and a copy that runs when the owner dies still reads whole, unchanged memory.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from suika.core.host_memory import host_memory

_MAP_POPULATE = 0x8000  # page tables are filled now, not at the first touch
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True)
class Span:
    """Bytes [offset, offset + num_bytes) of an open memfd."""

    fd: int
    offset: int
    num_bytes: int


_mapped: dict[int, Span] = {}  # of this process, by address; an entry lives as long as its tensors


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor whose memory can be shown to others. Its pages are touched: writing to it faults no more.

    Raises `MemoryError` when the memory is not there.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(tuple(shape), dtype=dtype)
    available = available_bytes()
    if num_bytes > available:  # the kernel would not refuse: it would go and kill processes to find the pages
        raise MemoryError(f"{num_bytes} bytes of shared memory are needed, {available} are available")
    fd = os.memfd_create("suika", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, num_bytes)  # what is missing all the same is missed here, not by SIGBUS at a write
        return attach(fd, num_bytes).view(dtype).view(tuple(shape))
    except BaseException:
        os.close(fd)
        raise


def placed(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy of it in memory that can be shown. What is on a device stays there."""
    if not tensor.numel() or tensor.device.type != "cpu" or span_of(tensor) is not None:
        return tensor
    copy = empty(tensor.shape, tensor.dtype)
    return copy.copy_(tensor)


def attach(fd: int, num_bytes: int) -> torch.Tensor:
    """Map a whole memfd as bytes. `fd` belongs to the mapping from now on: closed when the last tensor goes."""
    address = _map(fd, 0, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    _mapped[address] = Span(fd, 0, num_bytes)
    weakref.finalize(memory, _drop, address).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory` alive


def glance(span: Span) -> torch.Tensor:
    """Map part of a memfd as bytes for reading; `span.fd` stays the caller's and may be closed at once."""
    first = span.offset - span.offset % mmap.PAGESIZE
    length = span.offset + span.num_bytes - first
    address = _map(span.fd, first, length, mmap.PROT_READ)
    memory = (ctypes.c_uint8 * length).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, length).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)[span.offset - first :]


def span_of(tensor: torch.Tensor) -> Span | None:
    """Where a contiguous tensor lies, or None when nobody else could map it."""
    start = tensor.untyped_storage().data_ptr()
    whole = _mapped.get(start)
    if whole is None:
        return None
    return Span(whole.fd, tensor.data_ptr() - start, tensor.numel() * tensor.element_size())


def held_bytes() -> int:
    """What this process holds of such memory (buffers that it only looks into do not count)."""
    return sum(span.num_bytes for span in _mapped.values())


def available_bytes() -> int:
    """What this host, or the control group that this process is in, can still give without swapping."""
    return host_memory().available_bytes


def _map(fd: int, offset: int, num_bytes: int, protection: int) -> int:
    address = _libc.mmap(None, num_bytes, protection, mmap.MAP_SHARED | _MAP_POPULATE, fd, offset)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {num_bytes} bytes of shared memory: {os.strerror(number)}")
    return address


def _drop(address: int) -> None:
    span = _mapped.pop(address)
    _libc.munmap(address, span.num_bytes)
    os.close(span.fd)
