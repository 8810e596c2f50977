"""The launches of a call, found by running its host code once on tensors without memory (torch's device "meta").

Host code allocates with torch.empty and launches through runtime.py; run on real tensors it does so in every call. Script, it runs once
for all calls that differ by nothing but addresses: launches keep, for every operand, which tensor it is and where in it, and what was
allocated on the way shares one workspace. What two launches do not need at the same time may lie in the same place, in the call's results
too, before the launch that first touches them. A programmatic launch runs beside the one before it. Anything but allocations, views and
launches is lost: tests/test_hopper_rehearsal.py watches that there is nothing else. (Watching, torch.empty_like too, make torch import a
thousand modules: seconds of a first call.)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from openkda.hopper.runtime import Launch, Matrix, Pointer, listener

ALIGNMENT = 256  # bytes


class Script(NamedTuple):
    """A call that was rehearsed. The operands of its launches: what was given, the results, the constants, then the workspace."""

    launches: list[Launch]
    results: list[torch.Tensor | None]  # without memory: their shapes and dtypes
    constants: list[torch.Tensor]  # on the host
    size: int  # bytes of the workspace


@dataclass
class Memory:
    """A tensor's, by the launches that touch it."""

    tensor: torch.Tensor
    first: int
    last: int
    operand: int = -1  # where it lies
    offset: int = 0

    @property
    def size(self) -> int:
        """Bytes, whole units of ALIGNMENT"""
        return -(-self.tensor.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT


class Rehearsal:
    """A Listener: see runtime.py."""

    def __init__(self) -> None:
        self.launches: list[tuple[Launch, list[tuple[int, int] | None]]] = []  # operands: their memory, bytes into it
        self.memory: dict[int, Memory] = {}
        self.constants: list[torch.Tensor] = []
        self.stand_ins: list[torch.Tensor] = []

    def constant(self, table: torch.Tensor) -> torch.Tensor:
        """What stands for a table of the host's."""
        self.constants.append(table)
        self.stand_ins.append(torch.empty(table.shape, dtype=table.dtype, device="meta"))
        return self.stand_ins[-1]

    def add(self, launch: Launch, operands: Sequence[torch.Tensor | None]) -> None:
        """A launch on these operands."""
        now = len(self.launches)
        begin = now - launch.pdl  # beside the launch before
        places: list[tuple[int, int] | None] = []
        for x in operands:
            if x is None:
                places.append(None)
                continue
            key = x.untyped_storage()._cdata
            self.memory.setdefault(key, Memory(x, begin, now)).last = now
            places.append((key, x.storage_offset() * x.element_size()))
        self.launches.append((launch, places))

    def finish(self, given: Sequence[torch.Tensor | None], results: Sequence[torch.Tensor | None], scratch: bool) -> Script:
        """Everything in its place. scratch: results hold nothing before the launch that first touches them."""
        known = [*given, *results, *self.stand_ins]
        for operand, x in enumerate(known):
            if x is not None and (found := self.memory.get(x.untyped_storage()._cdata)) is not None:
                found.operand = operand
        for x in results:
            if x is not None and (x.storage_offset() or not x.is_contiguous()):
                raise RuntimeError(f"a result {list(x.shape)} of a call that is rehearsed is part of another tensor")
        places = range(len(given), len(given) + len(results))
        homes = [x for x in self.memory.values() if x.operand in places] if scratch else []
        work = [x for x in self.memory.values() if x.operand < 0]
        size = settle(work, homes, len(known))
        return Script([self.placed(*x) for x in self.launches], list(results), self.constants, size)

    def placed(self, launch: Launch, places: Sequence[tuple[int, int] | None]) -> Launch:
        """The launch on the operands of the whole call"""

        def place(x: object) -> object:
            if not isinstance(x, (Pointer, Matrix)):
                return x
            key, offset = places[x.operand]
            found = self.memory[key]
            return x._replace(operand=found.operand, offset=x.offset + found.offset + offset)

        return replace(launch, args=tuple(map(place, launch.args)))


def settle(work: Sequence[Memory], homes: Sequence[Memory], operand: int) -> int:
    """Give every memory of `work` a place in one of `homes` that is touched later only and is large enough, else in the workspace, number
    `operand`, whose size is returned. The largest first, each at the first place that nothing holds which is needed with it."""
    settled: dict[int, list[Memory]] = {x.operand: [] for x in homes}
    settled[operand] = []
    size = 0

    def gap(x: Memory, at: int) -> int:
        """The first place for x in `at`"""
        begin = 0
        for y in sorted(settled[at], key=lambda y: y.offset):
            if y.first <= x.last and x.first <= y.last:
                if begin + x.size <= y.offset:
                    break
                begin = max(begin, y.offset + y.size)
        return begin

    for x in sorted(work, key=lambda x: x.size, reverse=True):
        for home in homes:
            x.offset = gap(x, home.operand)
            if x.last < home.first and x.offset + x.size <= home.tensor.untyped_storage().nbytes():
                x.operand = home.operand
                break
        else:
            x.operand, x.offset = operand, gap(x, operand)
            size = max(size, x.offset + x.size)
        settled[x.operand].append(x)
    return size


def rehearse(call: Callable[..., list[torch.Tensor | None]], given: Sequence[torch.Tensor | None], scratch: bool, *rest: object) -> Script:
    """call(*given, *rest), a list of results, rehearsed.

    Args: given: tensors without memory, or None; scratch: the results' memory may serve before it holds them."""
    rehearsal = Rehearsal()
    token = listener.set(rehearsal)
    try:
        with torch.no_grad():
            results = call(*given, *rest)
    finally:
        listener.reset(token)
    return rehearsal.finish(given, results, scratch)
