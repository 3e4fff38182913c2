"""Moves tensors and small objects from one rank to another, bit by bit.

A transfer is described first (names, types, shapes), so that the receiver can make what it does not have: a process
that has come back has not stepped its optimizer yet and holds no state. Then the bytes follow, in pieces of bounded
size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

PIECE_BYTES = 64 * 2**20


def send_object(value: Any, target: int) -> None:
    """Send a picklable object to a global rank."""
    dist.send_object_list([value], dst=target, device=_device())


def receive_object(source: int) -> Any:
    """Receive an object from a global rank."""
    box: list[Any] = [None]
    dist.recv_object_list(box, src=source, device=_device())
    return box[0]


def send_tensors(tensors: Sequence[torch.Tensor], target: int) -> int:
    """Send tensors whose sizes the receiver knows. Returns the bytes sent."""
    sent = 0
    for piece in _pieces([_bytes(tensor) for tensor in tensors]):
        packed = piece[0].contiguous() if len(piece) == 1 else torch.cat(piece)
        dist.send(packed, dst=target)
        sent += packed.numel()
    return sent


def receive_tensors(tensors: Sequence[torch.Tensor], source: int) -> int:
    """Receive into tensors, in the order in which they are sent. Returns the bytes received."""
    received = 0
    for piece in _pieces([_bytes(tensor) for tensor in tensors]):
        packed = torch.empty(sum(part.numel() for part in piece), dtype=torch.uint8, device=piece[0].device)
        dist.recv(packed, src=source)
        start = 0
        for part in piece:
            part.copy_(packed[start : start + part.numel()])
            start += part.numel()
        received += packed.numel()
    return received


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, as bytes."""
    return tensor.detach().view(-1).view(torch.uint8)


def _pieces(parts: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group small parts and cut large ones, each piece at most PIECE_BYTES; the same on both sides."""
    piece: list[torch.Tensor] = []
    room = PIECE_BYTES
    for part in parts:
        for start in range(0, part.numel(), PIECE_BYTES):
            cut = part[start : start + PIECE_BYTES]
            if piece and (cut.numel() > room or cut.device != piece[0].device):
                yield piece
                piece, room = [], PIECE_BYTES
            piece.append(cut)
            room -= cut.numel()
    if piece:
        yield piece


def _device() -> torch.device:
    """Where objects travel: host memory over gloo, else the device of the default group's backend."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else torch.device("cuda")
